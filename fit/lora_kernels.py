"""Fit an estimate's terms of adapters to vLLM's own benchmark of its LoRA kernels on one's own GPU.

`benchmarks/kernels/benchmark_lora.py` of vLLM prints tables of `torch.utils.benchmark.Compare`: rows are sizes as JSON
(`bench_sublabel`), columns are kernels, and a label gives the number of calls in each time (`--cuda-graph-nops`). The
cost of adapters in a step is the sum of the kernels of all modules and layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from packer.errors import FileFormatError, IncompatibleError, ModelError
from packer.fit.dimensions import LORA_MODULES, ModelDimensions
from packer.fit.models import model_named
from packer.fit.step_law import Equations, Prior, solve
from packer.io.documents import parse_json
from packer.profile import Profile
from packer.terms import LINEAR
from packer.twin.law.linear import linear_features

Kernel = tuple[str, int, int, int, int]  # LORA_SHRINK or LORA_EXPAND, tokens, adapters in the batch, rank, slices.
Times = Mapping[Kernel, Mapping[int, float]]  # Time of a call, ms, by kernel and the matrix dimension that is no rank.

KERNEL_TERMS = tuple(term.name for term in LINEAR if term.bound in ("adapters", "launches"))
_UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
_SIZES = ("m", "num_loras", "k", "n", "num_slices")
MOST_SIZE = 2**31


def read_lora_kernels(text: str) -> Times:
    """Kernel times that `benchmark_lora.py` printed, without experts and `torch.mm`; raises `FileFormatError`."""
    found: dict[Kernel, dict[int, float]] = {}
    rows: list[tuple[int, list[str]]] = []
    columns: list[str] = []
    calls = 1
    for line, content in enumerate(text.splitlines(), 1):
        if content.startswith("["):
            graph = re.search(r"cugraph (\d{1,6}) ops", content)
            rows, columns, calls = [], [], int(graph[1]) if graph else 1
        elif unit := re.match(r"Times are in \w+ \((\w+)\)", content):
            if unit[1] not in _UNITS or not calls:
                raise FileFormatError(f"expected a unit among {', '.join(_UNITS)}, got {unit[1]}.", row=line)
            for place, cells in rows:
                _add(found, columns, cells, _UNITS[unit[1]] / calls, place)
            rows = []
        elif "|" in content:
            cells = [cell.strip() for cell in content.split("  |  ")]
            if cells[0].startswith("{"):
                rows.append((line, cells))
            elif not cells[0]:
                columns = cells
    if rows or not found:
        raise FileFormatError("expected tables of LORA_SHRINK and LORA_EXPAND that end with their unit of time.")
    return found


def _add(found: dict[Kernel, dict[int, float]], heads: list[str], cells: list[str], unit_ms: float, line: int) -> None:
    try:
        sizes = parse_json(cells[0])
        tokens, adapters, k, n, slices = (int(sizes[name]) for name in _SIZES)
    except (ValueError, TypeError, KeyError, OverflowError):
        rule = f"expected a size as JSON with {', '.join(_SIZES)}, got {cells[0][:80]}."
        raise FileFormatError(rule, row=line) from None
    for column, cell in zip(heads[1:], cells[1:], strict=False):
        operation = column.partition("(")[0]
        number = re.fullmatch(r"(?:\(! *\d+%\) *)?(\d{1,12}(?:\.\d{1,12})?)", cell)
        # the kernels that vLLM calls add to the layer's output
        if operation not in ("LORA_SHRINK", "LORA_EXPAND") or "add_inputs=False" in column or not number:
            continue
        size, rank = (k, n) if operation == "LORA_SHRINK" else (n, k)
        if not all(1 <= each <= MOST_SIZE for each in (tokens, adapters, size, rank, slices)):
            raise FileFormatError(f"expected sizes of 1 to {MOST_SIZE:,}, got {cells[0][:80]}.", row=line)
        found.setdefault((operation, tokens, adapters, rank, slices), {})[size] = float(number[1]) * unit_ms


def with_lora_kernels(profile: Profile, times: Times) -> Profile:
    """Fit the profile's terms of adapters that are bound by kernels (`KERNEL_TERMS`) to these times.

    A term that the measured sizes do not determine stays near its value in the profile. `errors` do not change: no
    public measurement compares sums of these kernels with servers.

    Raises `IncompatibleError`: the profile is calibrated, or the benchmark does not cover its model's modules;
    `ModelError`: for no combination of tokens, adapters and rank were the kernels of all modules measured.
    """
    if profile.calibrated or profile.latency.form != "linear":
        rule = f"Expected an estimate of `packer profiles estimate` to improve, got {profile.label!r}."
        raise IncompatibleError(rule)
    model = model_named(profile.model.repository or profile.model.name)
    if model.kv_rank or model.state_layers:
        raise IncompatibleError(f"LoRA's modules of {model.name} are not those that the benchmark measures.")
    modules = _modules(model, profile.engine.lora_target_modules, profile.engine.tensor_parallel_size)
    states = sorted({(tokens, adapters, rank) for _, tokens, adapters, rank, _ in times})
    sums = np.array([model.layers * _sum_ms(times, state, modules) for state in states])
    known = np.isfinite(sums)
    if not known.any():
        slices = sorted({count for _, _, count in modules})
        raise ModelError(
            "Expected LORA_SHRINK and LORA_EXPAND of equal tokens, adapters and rank with "
            f"{', '.join(map(str, slices))} slices, got none: run the benchmark with both op types."
        )
    tokens, adapters, ranks = np.array(states, dtype=np.float64)[known].T
    features = linear_features(
        decodes=tokens, adapters=adapters, sum_ranks=adapters * ranks, slots=adapters, slot_rank=ranks,
        graph_max_tokens=profile.latency.graph_max_tokens,
    )  # fmt: skip
    law = profile.latency
    own = {name: law.coefficients[name] for name in KERNEL_TERMS if law.coefficients.get(name)}
    found = solve(Equations(features, sums[known], np.ones(known.sum())), tuple(own), Prior(own, profile.name))
    fitted = {name: float(f"{value:.6g}") for name, value in found.items()}
    note = f"from LoRA kernels at {known.sum()} numbers of tokens, adapters and rank"
    return replace(profile.with_coefficients(**fitted), provenance={**profile.provenance, "adapters": note})


def _modules(model: ModelDimensions, chosen: Iterable[str], n: int) -> list[tuple[float, float, int]]:
    """Return for each module with LoRA: inputs and outputs of a slice on one of `n` GPUs, and its slices."""
    own = tuple(chosen) or (LORA_MODULES[:2] if model.experts else LORA_MODULES)
    shapes = model.lora_shapes(n)
    return [(inputs, outputs / slices, slices) for inputs, outputs, slices in map(shapes.__getitem__, own)]


def _sum_ms(times: Times, state: tuple[int, int, int], modules: list[tuple[float, float, int]]) -> float:
    """Sum the kernels of one layer, ms; NaN if one is missing. Times grow in proportion beyond the largest size."""
    total = 0.0
    for inputs, outputs, slices in modules:
        for operation, size in (("LORA_SHRINK", inputs), ("LORA_EXPAND", outputs)):
            measured = times.get((operation, *state, slices))
            if not measured:
                return float("nan")
            sizes = sorted(measured)
            each = np.interp(size, sizes, [measured[known] for known in sizes])
            total += float(each) * max(1.0, size / sizes[-1])
    return total
