"""The margins of plans for several models and kinds of server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError
from packer.io.profiles import load_profile
from packer.plan import Plan, Status
from packer.planning import kinds
from packer.planning.explore import Frontier
from packer.planning.recommend import recommend
from packer.planning.solve import solve
from packer.profile import Profile
from packer.solvers.evaluator import rate_margin_for
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.twin.margin import rate_margin
from packer.workload import Workload

LLAMA = load_profile("h100-64gb/llama-3.1-8b-instruct")
QWEN = load_profile("h100-64gb/qwen-2.5-7b-instruct")


def priced(profile: Profile, price: float, name: str | None = None) -> Profile:
    """The same server at another price."""
    return replace(profile, gpu=replace(profile.gpu, price_per_hour=price, name=name or profile.gpu.name))


def fleet(n: int, models: tuple[str | None, ...]) -> Workload:
    """`n` quiet adapters, the models in turn."""
    return Workload([Adapter(f"a{i}", 8, 0.05, model=models[i % len(models)]) for i in range(n)])


def test_each_kind_of_a_mix_has_its_own_margin_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of a mix are planned and judged at rates raised by the margin of their kind, whichever is named first."""
    exact, rough = priced(LLAMA, 3.0), replace(priced(LLAMA, 2.0, "other"), name="rough", errors={})
    own = {each.name: 1.0 + rate_margin_for(each) for each in (exact, rough)}
    assert own["rough"] > own[LLAMA.name]
    planned, judged_at = list[dict[str, float]](), list[list[float]]()

    def solved(_fleet: Workload, offered: Sequence[Profile], *_: Any, **more: Any) -> Any:
        planned.append({kind.name: 1.0 + more["margin"][kind] for kind in offered})
        parts = zip(((0, 1, 2), (3, 4, 5)), sorted(offered, key=lambda each: each.name), strict=True)
        bins = tuple(Bin(part, each.settings(3, 8), each) for part, each in parts)
        return SimpleNamespace(status=Status.FEASIBLE, bins=bins)

    def judge(mix: kinds.Mix, plan: Plan, _number: int) -> Plan:
        judged_at.append((mix.job.kept.planned.fleet.rates / mix.job.workload.rates).tolist())
        return replace(plan, verified=True)

    monkeypatch.setattr(kinds, "solve", solved)
    monkeypatch.setattr(kinds.Mix, "_cost", lambda _mix, servers: -len(servers))  # less than a kind alone
    monkeypatch.setattr(kinds.Mix, "judge", judge)
    for offered in ([exact, rough], [rough, exact]):
        recommend(fleet(6, (None,)), offered)
    first, second = sorted(own)
    assert planned == [pytest.approx(own)] * 2
    assert judged_at == [pytest.approx([own[first]] * 3 + [own[second]] * 3)] * 2


def test_a_confidence_gives_each_model_and_kind_its_own_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates on servers of each model and kind are raised by what the confidence requires of their profile alone."""
    offered = [LLAMA, replace(priced(LLAMA, 9.0, "other"), name="rough/llama"), QWEN]
    offered[1] = replace(offered[1], errors={key: error + 0.5 for key, error in LLAMA.errors.items()})
    seen = dict[str, float | None]()

    def begun(own: Workload, profile: Profile, **options: Any) -> Frontier:
        job = Frontier(own, profile, **options)
        seen.setdefault(profile.name, job.margin)
        return job

    monkeypatch.setattr(kinds, "Frontier", begun)
    two = fleet(4, ("llama-3.1-8b-instruct", "qwen-2.5-7b-instruct"))
    recommend(two, offered, confidence=0.8, verify=False)
    assert seen == {each.name: rate_margin(each, 0.8) for each in offered}
    assert len(set(seen.values())) == 3


@pytest.mark.parametrize("offered", [[LLAMA], [LLAMA, replace(LLAMA, name="rough", errors={})]])
def test_a_confidence_that_gives_no_margin_is_refused_before_the_search(
    offered: list[Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kind is planned with if another has no errors, or if a margin is given, too."""
    monkeypatch.setattr(kinds, "planned", lambda _task: pytest.fail("a search began"))
    if len(offered) > 1:
        with pytest.raises(IncompatibleError, match="no held-out capacity errors"):
            recommend(fleet(2, (None,)), offered, confidence=0.8)
    with pytest.raises(ValidationError, match="got both"):
        recommend(fleet(2, (None,)), offered, confidence=0.8, margin=0.1)


@pytest.mark.parametrize("errors", [{}, LLAMA.errors])
def test_the_margin_of_a_mix_is_the_largest_of_its_servers(
    errors: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that is offered but not used does not count; where margins differ, the decision says them."""
    used = [priced(LLAMA, 3.0), replace(priced(LLAMA, 2.0, "other"), name="rough", errors=errors)]
    unused = replace(LLAMA, name="unused", errors={key: error + 0.5 for key, error in LLAMA.errors.items()})

    def solved(*_: Any, **_more: Any) -> Any:
        parts = zip(((0, 1, 2), (3, 4, 5)), used, strict=True)
        bins = tuple(Bin(part, each.settings(3, 8), each) for part, each in parts)
        return SimpleNamespace(status=Status.FEASIBLE, bins=bins)

    monkeypatch.setattr(kinds, "solve", solved)
    monkeypatch.setattr(kinds.Mix, "_cost", lambda _mix, servers: -len(servers))  # less than a kind alone
    monkeypatch.setattr(kinds.Mix, "judge", lambda _mix, plan, _number: replace(plan, verified=True))
    monkeypatch.setattr(kinds, "cheapest", lambda found: found[-1])
    plan = recommend(fleet(6, (None,)), [*used, priced(unused, 1.0)])
    own = [rate_margin_for(each) for each in used]
    assert plan.margin == max(own)
    words = f"\nRates are raised by {100 * own[0]:.3g} % on {LLAMA.name}, {100 * own[1]:.3g} % on rough."
    assert (words in plan.decision) == (own[0] != own[1])
    assert "Rates are raised" in plan.decision or own[0] == own[1]


def test_the_margin_for_several_models_is_the_largest_and_each_is_said() -> None:
    """A plan of two models, whose profiles have other errors, says by how much rates are raised on each."""
    plan = recommend(fleet(4, ("llama-3.1-8b-instruct", "qwen-2.5-7b-instruct")), [LLAMA, QWEN], verify=False)
    first, second = (rate_margin_for(each) for each in (LLAMA, QWEN))
    assert plan.margin == max(first, second)
    words = f"Rates are raised by {100 * first:.3g} % on {LLAMA.name}, {100 * second:.3g} % on {QWEN.name}."
    assert plan.decision.endswith(words)


def test_the_search_for_mixes_raises_the_rates_of_a_kind() -> None:
    """Servers of a kind with rates raised beyond the margin hold at those rates; without, they are fuller."""
    dear, cheap = small_profile("dear/m", 3.0), small_profile("cheap/m", 1.0)
    busy, predictor = random_fleet(60, seed=4, rates=(0.8, 0.4)), AnalyticPredictor()
    held = []
    for margin in ({cheap: 0.5, dear: 0.0}, {cheap: 0.0, dear: 0.5}):
        plan = solve(
            busy, [dear, cheap], "cost", solver="mixed", predictor=predictor, margin=margin, verify=False,
            with_headroom=False, time_limit_s=20.0,
        )  # fmt: skip
        assert plan.status is not Status.INFEASIBLE
        assert {item.profile for item in plan.bins} == {cheap}
        held.append(predictor.evaluate(busy.scaled(1.5), plan.bins).feasible.all())
    assert held == [True, False]
