"""Compare a result of `vllm bench serve` with the twin's prediction of the same run.

The client sends `num_prompts` requests, at once or at random times of `request_rate`, and keeps at most
`max_concurrency` of them open (vllm/benchmarks/serve.py): a replayed trace behind a client that holds requests back.
`--save-detailed` records the lengths of each request; without it all have the mean length. Which adapter of
`--lora-modules` a request had is never recorded: the client draws one uniformly, and so does the prediction.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from packer.adapter import Adapter
from packer.arrays import IntArray
from packer.arrival import RequestTrace
from packer.bin import Bin
from packer.errors import FileFormatError, IncompatibleError, reading, shown
from packer.fit.bench_results import documents
from packer.io.files import read_text
from packer.profile import Profile
from packer.twin.run import Run
from packer.twin.scores import smape
from packer.twin.simulate import simulate
from packer.workload import Workload

FIGURES = (
    "request_throughput", "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms",
    "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "p99_itl_ms",
)  # fmt: skip
"""Figures that both sides have, by the names of `vllm bench serve`."""
MOST_TIMES = 20.0  # The simulation of a prediction may last this many times as long as the benchmark.
SHORTEST_S = 60.0


@dataclass(frozen=True, eq=False)
class BenchRun:
    """A run of the benchmark and its prediction; `measured` `FIGURES`; `assumed`: what the file does not say."""

    measured: dict[str, float]
    simulation: Run
    assumed: tuple[str, ...]

    @property
    def predicted(self) -> dict[str, float]:
        """The same figures of the simulation; throughput is over the time until the last request was answered."""
        sim, done = self.simulation, self.simulation.completed
        if not done:
            return dict.fromkeys(self.measured, math.nan)
        lasted = float(np.nanmax(sim.raw.finish_s))
        return {
            name: getattr(sim, name) * (sim.duration_s / lasted if name.endswith("throughput") else 1.0)
            for name in self.measured
        }

    @property
    def errors(self) -> dict[str, float]:
        """SMAPE of each figure, percent; NaN where nothing was predicted."""
        predicted = self.predicted
        return {
            name: math.nan if math.isnan(predicted[name]) else smape([(predicted[name], value)])
            for name, value in self.measured.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: predicted, measured and SMAPE of each figure."""
        both = (self.predicted, self.measured, self.errors)
        figures = {
            name: dict(zip(("predicted", "measured", "smape"), (each[name] for each in both), strict=True))
            for name in self.measured
        }
        return {"status": self.simulation.status, "figures": figures, "assumed": list(self.assumed)}


def beside_bench(
    path: str | os.PathLike[str], profile: Profile, *, fleet: Workload | None = None,
    server: Bin | None = None, seed: int = 0,
) -> list[BenchRun]:  # fmt: skip
    """Predict each run in a result file of `vllm bench serve`.

    `profile`: of the server. `fleet`, `server`: the adapters that the requests were for and the server's slots; None:
    requests to the base model. `seed`: of the adapters and times that the file does not record.

    Raises `FileFormatError`: it is no such file; `IncompatibleError`: the client's rate rose during the run.
    """
    slots: dict[str, Any] = {"max_loras": 0}
    if fleet is None or server is None:
        fleet = Workload([Adapter("base", 0, 1.0)])
    else:
        fleet, profile, slots = server.workload(fleet), server.profile, asdict(server.settings)
    runs = []
    with reading(path):
        for document in documents(read_text(path)):
            if not isinstance(document, dict) or "request_throughput" not in document:
                raise FileFormatError(f"expected a result of vllm bench serve, got {shown(document)}.")
            trace, assumed = _requests(document, len(fleet), seed)
            measured = {name: value for name in FIGURES if math.isfinite(value := _number(document, name))}
            ceiling = document.get("max_concurrency")
            duration_s = max(SHORTEST_S, MOST_TIMES * _number(document, "duration"), trace.span_s + 1.0)
            found = simulate(
                fleet.replaying(trace), profile, **slots, duration_s=duration_s, concurrency=ceiling,
                paced=ceiling is not None, timeline_bin_s=duration_s, seed=seed,
            )  # fmt: skip
            runs.append(BenchRun(measured, found, assumed))
    return runs


def _requests(document: dict[str, Any], adapters: int, seed: int) -> tuple[RequestTrace, tuple[str, ...]]:
    """The requests of a run as far as the file has them, and what is assumed for the rest, in words."""
    if document.get("ramp_up_strategy") is not None:
        raise IncompatibleError("Expected a benchmark at a steady rate, got one whose rate rises (ramp_up_strategy).")
    rng, assumed = np.random.default_rng(seed), []
    inputs, outputs = _lengths(document, "input_lens"), _lengths(document, "output_lens")
    if inputs is None or outputs is None or len(inputs) != len(outputs):
        n = int(_number(document, "completed", low=1.0))
        inputs, outputs = (
            np.full(n, max(1, round(_number(document, f"total_{side}_tokens", low=1.0) / n)), dtype=np.int64)
            for side in ("input", "output")
        )
        assumed.append("every request has the mean lengths (--save-detailed records each one's)")
    answered = (inputs > 0) & (outputs > 0)  # failed requests have no output
    inputs, outputs = inputs[answered], outputs[answered]
    if not len(inputs):
        raise FileFormatError("expected a run with at least one answered request, got none.")
    time_s, n = np.zeros(len(inputs)), len(inputs)
    if document.get("request_rate") not in (None, "inf"):
        rate = _number(document, "request_rate", 1e-9)
        # The client's gaps are gamma-distributed with this shape; 1 is Poisson (`get_request`).
        shape = _number(document, "burstiness", 1e-3) if "burstiness" in document else 1.0
        time_s = np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), size=n))
        assumed.append(f"requests come at random times, {rate:g} in a second")
    owner = rng.integers(adapters, size=n)
    if adapters > 1:
        assumed.append(f"each request has one of the {adapters} adapters, all equally often")
    return RequestTrace(time_s, owner, inputs, outputs, end_s=float(time_s[-1]) + 1.0), tuple(assumed)


def _lengths(document: dict[str, Any], key: str) -> IntArray | None:
    given = document.get(key)
    if not isinstance(given, list) or not all(isinstance(each, int) for each in given):
        return None
    return np.array(given, dtype=np.int64)


def _number(document: dict[str, Any], key: str, low: float = -math.inf) -> float:
    value = document.get(key)
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if low > -math.inf and not (known and value >= low):  # type: ignore[operator]
        raise FileFormatError(f"expected {key} >= {low:g}, got {shown(value)}.")
    return float(value) if known else math.nan  # type: ignore[arg-type]
