"""Energy of a plan: board power of its GPUs times the share that inference draws, and nothing where that is unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from math import nan
from pathlib import Path

import pytest

from packer import load_profile, solve
from packer.adapter import Adapter
from packer.evaluation import Evaluations
from packer.fit.estimate import estimate_profile
from packer.io.plans import load_plan
from packer.job import FineTuning
from packer.plan import Plan
from packer.report.energy import energy_of, share_of, with_energy
from packer.speculation import SpeculationSpec
from packer.twin.datasheets import GPUS, datasheet
from packer.twin.simulate import simulate
from packer.workload import Workload

DRAFTS = SpeculationSpec("eagle3", 3, 0.6, draft_pass_ms=0.8, model="acme/eagle")


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
            adapter.rate * tokens for adapter, tokens in zip(fleet.adapters, fleet.mean_output_tokens, strict=True)
        )
        expected += 2 * datasheet("h200").watts * share_of(generated * found.served_share * found.mean_itl_ms / 1e3)
    assert energy.watts == pytest.approx(expected)
    assert energy.kwh_per_day == pytest.approx(energy.watts * 86400 / 3.6e6)
    served = float(plan.evaluations.total_token_throughput.sum())
    assert energy.joules_per_token * served == pytest.approx(energy.watts)
    assert "GPUs alone" in str(energy)
    assert with_energy(plan)["energy"]["watts"] == energy.watts


def test_ranks_draw_by_their_own_requests(toy_plan: Callable[..., Plan]) -> None:
    """Two data-parallel ranks draw as two servers with half of the requests each."""
    plan = toy_plan(("a", "b"))

    def watts(seen: Evaluations, gpus: int, **sizes: int) -> float:
        profile = estimate_profile("Qwen/Qwen3-30B-A3B", "h200", max_model_len=4096)
        profile = replace(profile, engine=replace(profile.engine, **sizes))
        bins = tuple(replace(each, profile=profile) for each in plan.bins)
        energy = energy_of(replace(plan, bins=bins, evaluations=seen))
        assert energy is not None
        return energy.watts / gpus

    seen = plan.evaluations
    half = replace(seen, total_token_throughput=seen.total_token_throughput / 2)
    assert watts(seen, 2, data_parallel_size=2) == pytest.approx(watts(half, 1))


def on_h200(plan: Plan) -> Plan:
    """The plan on GPUs whose board power is known."""
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", max_model_len=4096)
    return replace(plan, bins=tuple(replace(each, profile=profile) for each in plan.bins))


def test_power_is_that_of_the_time_per_token(toy_plan: Callable[..., Plan]) -> None:
    """With speculation ITL is the time between chunks of several tokens: the time per token gives running requests."""
    plan = on_h200(toy_plan(("a", "b"), gpus=1))
    (server,), (found,) = plan.bins, plan.evaluations
    engine = replace(server.profile.engine, version="0.32.0", speculation=DRAFTS)
    server = replace(server, profile=replace(server.profile, engine=engine))
    fleet = server.workload(plan.workload)
    running = found.served_share * float(fleet.rates @ fleet.mean_output_tokens) * found.mean_tpot_ms / 1e3
    for itl, tpot in ((2.4 * found.mean_tpot_ms, found.mean_tpot_ms), (found.mean_tpot_ms, nan)):
        given = Evaluations.of([replace(found, mean_itl_ms=itl, mean_tpot_ms=tpot)])
        energy = energy_of(replace(plan, bins=(server,), evaluations=given))
        assert energy is not None
        assert energy.watts == pytest.approx(datasheet("h200").watts * share_of(running))


def test_running_requests_are_those_of_the_simulation() -> None:
    """A server that speculates draws the power of the requests that the twin sees running on it."""
    base = load_profile("h100-64gb/llama-3.1-8b-instruct")
    profile = replace(base, engine=replace(base.engine, version="0.32.0", speculation=DRAFTS))
    fleet = Workload([Adapter("a", 16, 4.0, acceptance=0.8), Adapter("b", 8, 3.0, acceptance=0.2)])
    plan = solve(fleet, profile, objective="gpus")
    (server,) = plan.bins
    run = simulate(fleet, profile, **asdict(server.settings))
    energy = energy_of(plan)
    board = {sheet.title: sheet.watts for sheet in GPUS.values()}
    assert energy is not None
    assert run.mean_itl_ms > 1.5 * run.mean_tpot_ms
    assert energy.watts == pytest.approx(board[profile.gpu.name] * share_of(run.mean_running), rel=0.02)


@pytest.mark.parametrize(("job", "told"), [(FineTuning(), True), (FineTuning(policy="none"), False), (None, False)])
def test_training_that_is_not_counted_is_named(
    toy_plan: Callable[..., Plan], job: FineTuning | None, told: bool
) -> None:
    """The load that is counted is that of requests; where servers also train, the line and --json say so."""
    plan = on_h200(toy_plan(("a", "b")))
    plan = replace(plan, workload=replace(plan.workload, fine_tuning=job))
    energy = energy_of(plan)
    assert energy is not None
    assert ("training not included" in str(energy)) is told
    assert with_energy(plan)["energy"]["without_training"] is told


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
