"""Energy of a plan: board power of its GPUs times the share that inference draws, and nothing where that is unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from packer.fit.estimate import estimate_profile
from packer.io.plans import load_plan
from packer.plan import Plan
from packer.report.energy import energy_of, share_of, with_energy
from packer.twin.datasheets import datasheet


def test_power_is_that_of_every_gpu(toy_plan: Callable[..., Plan]) -> None:
    """Servers of two GPUs draw twice, by the requests that run on them; energy per token is power over throughput."""
    plan = toy_plan(("a", "b"))
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", tensor_parallel_size=2, max_model_len=4096)
    plan = replace(plan, bins=tuple(replace(each, profile=profile) for each in plan.bins))
    energy = energy_of(plan)
    assert energy is not None
    expected = 0.0
    for item, found in zip(plan.bins, plan.evaluations, strict=True):
        fleet = item.workload(plan.workload)
        generated = sum(
            adapter.rate * tokens
            for adapter, tokens in zip(fleet.adapters, fleet.mean_output_tokens, strict=True)
        )
        expected += (
            2 * datasheet("h200").watts * share_of(generated * found.served_share * found.mean_itl_ms / 1e3)
        )
    assert energy.watts == pytest.approx(expected)
    assert energy.kwh_per_day == pytest.approx(energy.watts * 86400 / 3.6e6)
    served = float(plan.evaluations.total_token_throughput.sum())
    assert energy.joules_per_token * served == pytest.approx(energy.watts)
    assert "GPUs alone" in str(energy)
    assert with_energy(plan)["energy"]["watts"] == energy.watts


def test_more_load_draws_more() -> None:
    """From idle over one request to a full batch the share rises to the measured ones, and no further."""
    shares = [share_of(running) for running in (0.0, 0.5, 1.0, 2.0, 16.0, 128.0, 4096.0)]
    assert shares == sorted(shares)
    assert [700 * shares[k] for k in (0, 2, 5, 6)] == pytest.approx([137, 300, 600, 600])


def test_json_with_energy_is_still_a_plan(toy_plan: Callable[..., Plan], tmp_path: Path) -> None:
    """What --json prints is read as the plan that it is."""
    plan, path = toy_plan(("a", "b")), tmp_path / "plan.json"
    path.write_text(json.dumps(with_energy(plan)))
    assert load_plan(path).bins == plan.bins


def test_a_gpu_without_a_data_sheet_has_none(toy_plan: Callable[..., Plan]) -> None:
    """No power is invented."""
    assert energy_of(toy_plan(("a", "b"))) is None
