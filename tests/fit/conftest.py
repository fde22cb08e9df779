"""Runs that a known profile "measured": what a calibration must find again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.fit.runs import simulate_run
from packer.fit.tables import MeasuredRun
from packer.io.profiles import load_profile
from packer.profile import LatencySpec, Profile

TRUE_LAW = {
    "base_ms": 9.0,
    "per_decode_ms": 0.03,
    "per_prefill_token_ms": 0.04,
    "per_adapter_ms": 0.4,
    "per_slot_rank_ms": 0.1,
}


@pytest.fixture(scope="session")
def true_profile() -> Profile:
    """A server whose step law is known: the H100's memory with an invented law."""
    shipped = load_profile("h100-64gb/qwen-2.5-7b-instruct")
    return replace(shipped, latency=LatencySpec("linear", TRUE_LAW, 512), errors={})


def _blank_run(number: int, rng: np.random.Generator) -> MeasuredRun:
    n = int(rng.choice([8, 24, 64]))
    rank = int(rng.choice([8, 16, 32]))
    return MeasuredRun(
        run_id=f"run{number}",
        family=f"family{number % 3}",
        rates=rng.uniform(0.02, 24.0 / n, n),
        ranks=np.full(n, rank),
        max_loras=int(rng.choice([8, 16, 64])),
        max_lora_rank=rank,
        duration_s=240.0,
        mean_input_tokens=223.0,
        mean_output_tokens=195.0,
        status="ok",
    )


def _measured(run: MeasuredRun, profile: Profile, seed: int) -> MeasuredRun:
    sim = simulate_run(run, profile, seed=seed)
    metrics = {
        "total_tok_s": sim.total_token_throughput,
        "request_throughput": sim.request_throughput,
        "tpot_mean_ms": sim.mean_tpot_ms,
        "itl_mean_ms": sim.mean_itl_ms,
        "ttft_mean_ms": sim.mean_ttft_ms,
        "ttft_median_ms": sim.median_ttft_ms,
        "mean_num_waiting": sim.mean_waiting,
    }
    return replace(run, metrics=metrics)


@pytest.fixture(scope="session")
def measured_runs(true_profile: Profile) -> list[MeasuredRun]:
    """24 runs of three families, "measured" on the true profile with seeds that no fit uses."""
    rng = np.random.default_rng(7)
    blank = [_blank_run(number, rng) for number in range(24)]
    return [_measured(run, true_profile, 50_000 + k) for k, run in enumerate(blank)]
