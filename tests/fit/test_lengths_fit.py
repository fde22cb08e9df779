"""The correlation of lengths is found from running requests and KV usage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.fit.lengths_fit import FEWEST_RUNS, fit_correlation
from packer.fit.runs import fleet_of
from packer.fit.tables import MeasuredRun
from packer.io.profiles import load_profile
from packer.twin.simulate import simulate


@pytest.fixture(scope="module")
def runs() -> list[MeasuredRun]:
    """Light runs of the twin itself, whose lengths have a correlation of -0.6."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    found = []
    for k in range(FEWEST_RUNS):
        run = MeasuredRun(str(k), "one", np.full(16, 0.4), np.full(16, 8), 16, 8, 1800.0, 223.0, 196.0, "ok", {}, -0.6)
        sim = simulate(fleet_of(run), profile, max_loras=16, max_lora_rank=8, duration_s=1800.0, seed=k)
        metrics = {"mean_num_running": sim.mean_running, "mean_kv_usage": sim.mean_kv_usage}
        found.append(replace(run, metrics=metrics, length_correlation=0.0))
    return found


def test_correlation_is_recovered(runs: list[MeasuredRun]) -> None:
    """What the runs hold per running request gives back the correlation that made them."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    assert fit_correlation(runs, profile) == pytest.approx(-0.6, abs=0.08)


def test_too_few_runs_tell_nothing(runs: list[MeasuredRun]) -> None:
    """Fewer runs than it takes, or runs without these metrics, give no correlation."""
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    assert fit_correlation(runs[:-1], profile) is None
    assert fit_correlation([replace(run, metrics={}) for run in runs], profile) is None
