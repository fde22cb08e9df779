"""LoRA kernels measured by vLLM's own benchmark replace the scaled terms of adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packer.errors import FileFormatError, IncompatibleError, ModelError
from packer.fit.bench_results import improved, read_bench_results
from packer.fit.estimate import estimate_profile
from packer.fit.lora_kernels import KERNEL_TERMS, read_lora_kernels, with_lora_kernels
from packer.io.profiles import load_profile
from packer.profile import Profile
from packer.terms import LINEAR_TERMS
from packer.twin.law.linear import linear_features

STATES = [(tokens, adapters, rank) for tokens in (8, 64, 256) for adapters in (1, 4, 16) for rank in (8, 32)]
LAYERS, KERNELS = 32, 8


def kernels_ms(profile: Profile, tokens: int, adapters: int, rank: int) -> float:
    """What the law's kernel terms add to a step."""
    features = linear_features(
        decodes=tokens, prefill_tokens=0, adapters=adapters, sum_ranks=adapters * rank, slots=adapters,
        slot_rank=rank, kv_tokens=0, waiting=0, graph_max_tokens=profile.latency.graph_max_tokens,
    )  # fmt: skip
    own = [profile.latency.coefficients.get(term, 0.0) * (term in KERNEL_TERMS) for term in LINEAR_TERMS]
    return float((features @ np.array(own))[0])


def printed(time_ms: Callable[[int, int, int], float], sizes: tuple[int, ...] = (1024, 16384), calls: int = 4) -> str:
    """What the benchmark prints, laid out as `torch.utils.benchmark.Compare` does (checked with torch 2.13)."""
    kernels = [
        "LORA_SHRINK() (bf16xbf16=>f32)",
        *(f"LORA_EXPAND(add_inputs={add}) (f32xbf16=>bf16)" for add in (True, False)),
    ]
    lines = [
        f"[---------- lora-torch.bfloat16 | cugraph {calls} ops ----------]",
        "  |  ".join(["      ", " single-lora roofline using torch.mm (bf16xbf16=>bf16) ", *kernels]),
        "1 threads: ----------------------------------------------------",
    ]
    for tokens, adapters, rank in STATES:
        for size in sizes:
            for slices in (1, 2, 3):
                for place, (k, n) in enumerate([(size, rank), (rank, size)]):
                    row = {"bs": tokens, "sl": 1, "m": tokens, "k": k, "n": n, "num_loras": adapters,
                           "sort_by_lora": True, "num_slices": slices}  # fmt: skip
                    us = f"{1e3 * calls * time_ms(tokens, adapters, rank):.6f}"
                    cells = ["  1.0 ", *(("", us, "(! 12%) 9e9") if place else (us, "", ""))]
                    lines.append("  |  ".join(["      " + json.dumps(row), *cells]))
    return "\n".join([*lines, "", "Times are in microseconds (us).", "== All Results ===="])


def test_terms_follow_the_kernels(tmp_path: Path) -> None:
    """Kernels 1.6 times as slow as the estimate says make steps with adapters slower by that, others stay equal."""
    estimate = estimate_profile("meta-llama/Llama-3.1-8B", "l40s")
    path = tmp_path / "lora.txt"
    path.write_text(printed(lambda *state: 1.6 * kernels_ms(estimate, *state) / LAYERS / KERNELS))
    better = improved(estimate, read_bench_results([path]))
    for state in STATES:
        assert kernels_ms(better, *state) == pytest.approx(1.6 * kernels_ms(estimate, *state), rel=0.02)
    assert {t: v for t, v in better.latency.coefficients.items() if t not in KERNEL_TERMS} == {
        t: v for t, v in estimate.latency.coefficients.items() if t not in KERNEL_TERMS
    }
    assert better.errors == estimate.errors
    assert "18 numbers of tokens" in better.provenance["adapters"]


def test_larger_matrices_take_longer_in_proportion() -> None:
    """Sizes between the measured ones are interpolated, larger ones proportional: a size too small is no excuse."""
    estimate = estimate_profile("meta-llama/Llama-3.1-8B", "l40s")
    small = with_lora_kernels(estimate, read_lora_kernels(printed(lambda *_: 0.01, sizes=(1024,))))
    large = with_lora_kernels(estimate, read_lora_kernels(printed(lambda *_: 0.01)))
    assert kernels_ms(small, 64, 4, 8) > 2.0 * kernels_ms(large, 64, 4, 8)
    assert kernels_ms(large, 64, 4, 8) == pytest.approx(LAYERS * KERNELS * 0.01, rel=0.1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("LORA_SHRINK( and no table", "expected tables"),
        (printed(lambda *_: 1.0).replace("(us)", "(h)"), "expected a unit"),
        (printed(lambda *_: 1.0).partition("Times")[0], "end with their unit"),
        (printed(lambda *_: 1.0).replace('"num_loras": 16', '"num_loras": 0'), "sizes of 1"),
        (printed(lambda *_: 1.0).replace('"num_loras": 16', f'"num_loras": {10**400}'), "sizes of 1 to"),
        (
            printed(lambda *_: 1.0).replace('"num_loras": 16', '"num_loras": ' + "[" * 9999),
            "row 52: expected a size as JSON",
        ),
        (printed(lambda *_: 1.0).replace('"m"', '"w"'), "row 4: expected a size as JSON"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    """A table cut off, of another unit or with other sizes names the file and the line."""
    path = tmp_path / "lora.txt"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=rule):
        read_bench_results([path])


def test_kernels_without_a_partner_are_refused() -> None:
    """Shrink alone says nothing of a step; calibrated profiles and compressed attention have no use for kernels."""
    times = read_lora_kernels(printed(lambda *_: 0.01))
    shrink = {kernel: each for kernel, each in times.items() if kernel[0] == "LORA_SHRINK"}
    with pytest.raises(ModelError, match="both op types"):
        with_lora_kernels(estimate_profile("meta-llama/Llama-3.1-8B", "l40s"), shrink)
    with pytest.raises(IncompatibleError, match="estimate"):
        with_lora_kernels(load_profile("h100-64gb/llama-3.1-8b-instruct"), times)
    with pytest.raises(IncompatibleError, match="modules"):
        with_lora_kernels(estimate_profile("moonshotai/Kimi-K2.5", "b200", tensor_parallel_size=8), times)
