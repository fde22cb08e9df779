"""Energy of a plan: board power of its GPUs times the share that inference draws, and nothing where that is unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from packer.fit.estimate import estimate_profile
from packer.plan import Plan
from packer.report.energy import SHARE, energy_of
from packer.twin.datasheets import datasheet


def test_power_is_that_of_every_gpu(toy_plan: Callable[..., Plan]) -> None:
    """Servers of two GPUs draw twice; energy per token is power over throughput."""
    plan = toy_plan(("a", "b"))
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", tensor_parallel_size=2, max_model_len=4096)
    plan = replace(plan, bins=tuple(replace(each, profile=profile) for each in plan.bins))
    energy = energy_of(plan)
    assert energy is not None
    board = 2 * len(plan.bins) * datasheet("h200").watts
    assert energy.watts == pytest.approx([share * board for share in SHARE])
    assert energy.kwh_per_day == pytest.approx(0.7 * board * 86400 / 3.6e6)
    served = float(plan.evaluations.total_token_throughput.sum())
    assert energy.joules_per_token * served == pytest.approx(energy.watts[1])
    assert "GPUs alone" in str(energy)


def test_a_gpu_without_a_data_sheet_has_none(toy_plan: Callable[..., Plan]) -> None:
    """No power is invented."""
    assert energy_of(toy_plan(("a", "b"))) is None
