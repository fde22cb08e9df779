"""A plan that is evaluated with its own seed has the figures that it carries, which are those of a simulated hour."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import packer
from packer import Workload, seeds
from packer.cli import run as command
from packer.cli.evaluated import conclusion_lines
from packer.operate import evaluate
from packer.operate.evaluate import evaluate_plan
from packer.plan import Plan
from packer.profile import Profile
from packer.twin import per_adapter
from packer.twin.hours import Hours


@pytest.fixture(scope="module", params=["gpus", "recommend"])
def plan(request: pytest.FixtureRequest, fleet: Workload, server: Profile) -> Plan:
    """A plan for the fewest GPUs, and one to deploy."""
    return packer.recommend(fleet, server) if request.param == "recommend" else packer.solve(fleet, server)


def test_figures_are_those_of_simulations(plan: Plan, fleet: Workload) -> None:
    """Every server of a plan has the mean TTFT, ITL and worst adapter of `packer.simulate` with the plan's seed."""
    for item, row in zip(plan.bins, plan.evaluations, strict=True):
        slots = {"max_loras": item.max_loras, "max_lora_rank": item.max_lora_rank}
        run = packer.simulate(item.workload(fleet), item.profile, seed=plan.seed, **slots)
        assert (row.mean_ttft_ms, row.mean_itl_ms) == (run.mean_ttft_ms, run.mean_itl_ms)
        assert row.worst_adapter_ttft_ms == run.worst_adapter_ttft_ms


def test_evaluated_again_they_are_the_same(plan: Plan) -> None:
    """With the seed of the plan, no figure of a server changes."""
    found = evaluate_plan(plan, seed=plan.seed)
    for name in (
        "total_token_throughput",
        "mean_ttft_ms",
        "mean_itl_ms",
        "worst_adapter_ttft_ms",
        "slo_used",
    ):
        np.testing.assert_array_equal(getattr(found.plan.evaluations, name), getattr(plan.evaluations, name))


def test_the_hour_is_one_that_made_no_plan() -> None:
    """The seed of an evaluation is none of those with which plans are searched, confirmed or verified."""
    used = {0, seeds.confirming(0), *(seeds.fresh(0, n) for n in range(1, 20_000))}
    used |= {seeds.further(0, n) for n in range(1_000)}
    used |= {seeds.of_server(seeds.fresh(0, n), k) for n in range(1, 500) for k in range(200)}
    asked = {seeds.evaluating(0), *(seeds.fresh(seeds.evaluating(0), n) for n in range(1, 12))}
    assert not used & asked


@pytest.mark.parametrize(
    ("broken", "holds", "said"),
    [
        ((), True, ""),
        ((2,), True, "break in 1 of 13 hours"),
        ((2, 3), True, "break in 2 of 13 hours"),
        ((1, 9), True, "break in 2 of 13 hours"),
        ((1, 4, 8), False, "break in 3 of 9 hours"),
        ((1, 4, 11), True, "break in 3 of 40 hours"),
        ((1, 11, 12, 25), False, "break in 4 of 40 hours"),
        ((4, 5, 6), True, ""),
        ((0,), True, "break in 1 of 13 hours"),
        ((0, 1), True, "break in 2 of 13 hours"),
        ((0, 5, 12), True, "break in 3 of 40 hours"),
        ((0, 5, 11, 12), False, "break in 4 of 13 hours"),
    ],
)
def test_one_hour_that_breaks_is_no_reason_for_another_plan(
    plan: Plan, broken: tuple[int, ...], holds: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If chance decides, three further hours are simulated, and 13 in all if one of the four breaks the limits. Three
    that break call for another plan if one in twenty seldom does so; else 40 hours tell. Text and JSON say how many."""
    seed = seeds.evaluating(plan.seed)
    holds_first = 0 not in broken
    bad = {seeds.fresh(seed, place) if place else seed for place in broken}

    def beyond(_plan: Plan, _changed: object, _hours: Hours, hour: int, *, apart: bool = False) -> float:
        assert apart is (holds_first and hour != seed)
        return 1.0 * (hour in bad)

    monkeypatch.setattr(Hours, "by_chance", lambda *_: True)
    monkeypatch.setattr(evaluate, "_beyond", beyond)

    def limits_kept(_plan: Plan, _changed: object, _found: object, hours: Hours) -> tuple[bool, tuple[str, ...]]:
        kept = hours.seed not in bad or not plan.limits
        return kept, () if kept else ("The latency limits break",)

    monkeypatch.setattr(evaluate, "_limits_kept", limits_kept)
    found = evaluate_plan(plan)
    assert found.holds is (holds or not plan.limits)
    shown = [reason for reason in found.plan.reasons if "break" in reason]
    assert len(shown) == bool(said and plan.limits)
    assert all(said in reason for reason in shown)
    if plan.limits:
        data = found.to_dict()
        assert f"break in {data['hours_over_limits']} of {data['hours']} hours" in (
            found.rarely or "break in 0 of 4 hours"
        )


def test_adapters_that_may_break_their_limits_count_by_their_expected_number(
    fleet: Workload, server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no adapter breaks its limits, but those with few requests may, an hour counts as many adapters as may be
    expected, not one; limits of servers that break are no chance."""
    made = packer.recommend(fleet, server)
    monkeypatch.setattr(per_adapter, "few_used", lambda _run, least=0.0: max(least, 1.02))
    monkeypatch.setattr(Hours, "by_chance", lambda *_: True)
    found = evaluate_plan(made)
    assert set(found.beyond) == {per_adapter.FEW_CHANCE * len(made.bins)}
    assert f"for 1 of {40 * len(found.beyond)} adapter-hours: " in found.rarely
    alone = evaluate_plan(made, seed=7)
    assert alone.by_few
    assert not alone.holds
    assert "adapters with few requests may wait" in str(conclusion_lines(alone)[0])
    both = evaluate_plan(made, seed=7, slo="p95_ttft_ms=2000,p95_itl_ms=1")
    assert both.over_limits
    assert not both.by_few


def test_what_breaks_the_limits_most_is_named(fleet: Workload, server: Profile) -> None:
    """The adapter, the server and the share of the limits that breaks them most are those of the worst hour looked at,
    in text and in JSON."""
    plan = packer.recommend(fleet.held_to("p95_ttft_ms=1000"), server)
    found = evaluate_plan(plan, slo="p95_ttft_ms=120")
    assert not found.holds
    assert found.worst is not None
    first = seeds.evaluating(plan.seed)
    hours = [seeds.fresh(first, place) for place, beyond in enumerate(found.beyond) if beyond]
    worst = 0.0
    for seed in hours:
        for item in plan.bins:
            own = seed if seed == first or found.beyond[0] else seeds.of_server(seed, item.adapters[0])
            slots = {"max_loras": item.max_loras, "max_lora_rank": item.max_lora_rank}
            run = packer.simulate(
                item.workload(plan.workload.held_to("p95_ttft_ms=120")), item.profile, seed=own, **slots
            )
            worst = max(worst, run.slo_used)
    assert found.worst.slo_used == pytest.approx(worst)
    assert found.to_dict()["worst"] == found.worst._asdict()
    assert f"most on server {found.worst.server} for adapter '{found.worst.adapter}'" in found.rarely
    assert found.rarely in found.plan.reasons


def test_a_verdict_near_chance_says_on_how_many_hours_it_stands(plan: Plan) -> None:
    """Where hours differ by chance, it is that of the hours simulated; headroom is as in a decision, "about"."""
    found = evaluate_plan(plan, rate_factor=0.5)
    said = [str(each) for each in conclusion_lines(replace(found, beyond=(0.0,) * 4))]
    assert any("The plan holds in 4 simulated hours." in each for each in said)
    said = [str(each) for each in conclusion_lines(replace(found, beyond=(0.0, 1.0, 0.0, 0.0)))]
    assert any("The plan holds: its latency limits break rarely." in each for each in said)
    assert any(re.search(r"has the least headroom: about \+\d+ %\.", each) for each in said)


def test_a_plan_with_a_spare_server_is_judged_after_each_loss(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It holds only if it does with each server lost, as `lose` says, behind a live router, too; an evaluated plan
    keeps its spare server."""
    rank = max(item.max_lora_rank for item in plan.bins)
    wide = tuple(replace(item, settings=item.profile.settings(item.max_loras, rank)) for item in plan.bins)
    plan = replace(plan, bins=wide)
    spare = replace(plan, statistics={"spare": 1})
    light, full = evaluate_plan(spare, rate_factor=0.01), evaluate_plan(spare)
    breaks = tuple(k for k in range(len(plan.bins)) if not evaluate_plan(plan, lose=[k]).holds)
    assert evaluate_plan(plan).holds
    assert breaks
    assert not full.holds
    assert (full.breaks_without, light.breaks_without, full.plan.spare) == (breaks, (), 1)
    assert evaluate_plan(spare, rate_factor=0.01, lose=[0]).breaks_without == ()
    (said,) = [str(each) for each in conclusion_lines(full) if "is lost" in str(each)]
    assert "The plan breaks when" in said
    assert any("also when any one server is lost" in str(each) for each in conclusion_lines(light))
    spare.save(path := tmp_path / "spare.json")
    for factor, code, words in (("0.01", 0, "also when any one server is lost"), ("1", 3, "The plan breaks when")):
        assert command(["evaluate", str(path), "--router", "plan", "--rate-factor", factor]) == code
        assert words in " ".join(capsys.readouterr().out.split())


def test_an_adapter_to_add_may_have_a_class_of_its_own(plan: Plan) -> None:
    """Limits of a class that only an adapter to add has are those of an adapter that will be there."""
    new = packer.Adapter("new", 8, 0.01, slo_class="chat")
    slo = "chat:p95_ttft_ms=9000"
    found = evaluate_plan(plan, add=[new], slo=slo, duration_s=60.0).plan.workload
    assert dict(found.slo.classes)["chat"].p95_ttft_ms == 9000.0
    with pytest.raises(packer.PackerError, match="'chat' of adapter 'new'"):
        evaluate_plan(plan, add=[new], slo="p95_ttft_ms=9000")


def test_a_server_without_requests_keeps_limits_of_latency(toy_profile: Profile) -> None:
    """A plan for an idle adapter within limits holds, with room to grow, and no limit is said to be unknown."""
    idle = Workload([packer.Adapter("a", 8, 0.0)])
    plan = packer.solve(idle, toy_profile, "slo:mean_ttft_ms=500", predictor="twin")
    found = evaluate_plan(plan, duration_s=60.0)
    assert (found.holds, found.plan.reasons) == (True, ())
    assert plan.rooms[0].headroom is not None


def test_adapters_that_a_share_lets_break_the_limits_are_no_broken_limits() -> None:
    """A plan that keeps its goal, of which one adapter in four may break it, was said to break it on its server, and to
    hold."""
    adapters = [packer.Adapter(f"a{k}", 8, 0.2) for k in range(3)]
    adapters.append(packer.Adapter("long", 8, 0.1, input_tokens=packer.Lengths.constant(60_000)))
    fleet = Workload(adapters).held_to("adapter_share=0.75")
    found = evaluate_plan(packer.recommend(fleet, packer.load_profile("h100-64gb/llama-3.1-8b-instruct")))
    assert found.plan.evaluations.slo_used.max() > 1.0
    assert found.holds
    assert found.over_limits == ()
    assert found.to_dict()["hours_over_limits"] == 0
