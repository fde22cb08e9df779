"""The plan to deploy for several models and kinds of server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError
from packer.fit.estimate import estimate_profile
from packer.fit.models import model_named
from packer.gpu import GpuKind
from packer.io.profiles import load_profile
from packer.plan import Moves, Plan, Status
from packer.planning import kinds
from packer.planning.explore import Frontier
from packer.planning.frontier import frontier
from packer.planning.kinds import Option
from packer.planning.loop import judged
from packer.planning.recommend import recommend
from packer.planning.solve import solve
from packer.profile import Profile
from packer.progress import silent
from packer.room import Room
from packer.testing.analytic import small_profile
from packer.twin.margin import MIXED
from packer.twin.simulate import simulate
from packer.workload import Workload

LLAMA = load_profile("h100-64gb/llama-3.1-8b-instruct")
QWEN = load_profile("h100-64gb/qwen-2.5-7b-instruct")


def priced(profile: Profile, price: float, name: str | None = None) -> Profile:
    """The same server at another price."""
    gpu = replace(profile.gpu, price_per_hour=price, name=name or profile.gpu.name)
    return replace(profile, gpu=gpu)


def fleet(n: int, models: tuple[str | None, ...]) -> Workload:
    """`n` quiet adapters, the models in turn."""
    return Workload([Adapter(f"a{i}", 8, 0.05, model=models[i % len(models)]) for i in range(n)])


def test_reasons_name_servers_by_their_numbers_in_the_whole_plan() -> None:
    """The servers of the second model come after those of the first, in reasons, too."""
    both = fleet(4, ("llama-3.1-8b-instruct", "qwen-2.5-7b-instruct"))
    plan = recommend(both, [LLAMA, QWEN], slo="mean_itl_ms=1", margin=0.0)
    assert [item.profile.model.name for item in plan.bins] == [LLAMA.model.name, QWEN.model.name]
    assert [text for text in plan.reasons if text.startswith("server ")] == [
        "server 0 breaks the goal",
        "server 1 breaks the goal",
    ]


@pytest.fixture(scope="module")
def two_models() -> Plan:
    """Two models; llama has a dear and a cheap kind of server."""
    kinds = [
        priced(LLAMA, 3.0),
        replace(priced(LLAMA, 2.0, "cheap GPU"), name="cheap/llama"),
        priced(QWEN, 3.0),
    ]
    return recommend(fleet(12, ("llama-3.1-8b-instruct", "qwen-2.5-7b-instruct")), kinds, margin=0.05)


def test_each_model_gets_the_cheapest_kind_that_keeps_the_goal(two_models: Plan) -> None:
    """Servers of equal speed: the cheaper one is taken, and the table says what the other would cost."""
    assert two_models.status is Status.FEASIBLE
    assert {item.profile.name for item in two_models.bins} == {"cheap/llama", QWEN.name}
    for item in two_models.bins:
        assert {two_models.workload.adapters[i].model for i in item.adapters} == {item.profile.model.name}
    rows = two_models.kinds
    assert [(row["kinds"], row["price_per_hour"]) for row in rows[:2]] == [
        (LLAMA.name, 3.0),
        ("cheap/llama", 2.0),
    ]


def test_kinds_of_one_name_are_told_apart() -> None:
    """Profiles that differ in price alone, as reserved and on-demand GPUs, have a number, and the one taken a mark."""
    found = recommend(fleet(2, (None,)), [priced(LLAMA, 3.0), priced(LLAMA, 2.0)], margin=0.05, verify=False)
    told = [(row["kinds"], row["price_per_hour"]) for row in found.kinds]
    assert [row["chosen"] for row in found.kinds] == [False, True]
    assert told == [(LLAMA.name, 3.0), (f"{LLAMA.name} (2)", 2.0)]
    again = recommend(found.workload, priced(LLAMA, 2.0), margin=0.05, verify=False, old_plan=found)
    assert again.moves == Moves((), (0,))  # its server is of this kind, whatever the number


def test_kinds_of_one_profile_share_its_trained_predictor() -> None:
    """Two prices of one server, such as reserved and on demand, are judged by the predictor of its profile."""
    offered = [priced(LLAMA, 3.0), priced(LLAMA, 1.3)]
    found = solve(fleet(6, (None,)), offered, objective="cost", solver="greedy", predictor="tree", verify=False)
    assert found.objective_value[0] == 1.3


def test_a_plan_for_several_models_is_verified_and_raised_as_its_parts_are(two_models: Plan) -> None:
    """One part that fresh hours broke breaks the whole, one that was not judged leaves it open; rates that were not
    raised, as those of a replayed trace, have no margin."""
    everyone = tuple(range(len(two_models.workload)))
    for parts, whole in ((True, True), True), ((True, False, None), False), ((None, True), None):
        plans = [replace(two_models, margin=None, verified=each) for each in parts]
        options = [Option(None, "kinds", plan, holds=True, told="") for plan in plans]
        found = kinds._merged(two_models.workload, [(everyone, each) for each in options], options, {}, 0.0)
        assert (found.verified, found.margin) == (whole, None)


def test_without_all_prices_the_fewest_gpus_decide(two_models: Plan) -> None:
    """A kind without a price is not taken for a free one: the number of GPUs decides, and the plan says so."""
    many = replace(two_models, bins=(*two_models.bins, *two_models.bins))
    bins = tuple(replace(item, profile=unpriced_profile(item.profile)) for item in many.bins)
    free = Option(None, "no price", replace(many, bins=bins), holds=True, told="")
    dear = Option(None, "dear", two_models, holds=True, told="")
    assert kinds.cheapest([free, dear]) is dear
    assert kinds.cheapest([replace(dear, kinds="other", holds=False), free]) is free
    rooms = tuple(Room(1.1) for _ in two_models.bins)
    tight = replace(dear, plan=replace(two_models, rooms=rooms))
    assert kinds.cheapest([tight, dear]) is dear  # of equal ones that with more room
    (said,) = kinds.unpriced([free, dear])
    assert "No price is known for no price: fewest GPUs decide" in said
    assert kinds.unpriced([dear]) == ()


def unpriced_profile(profile: Profile) -> Profile:
    """The same server without a price."""
    return replace(profile, gpu=replace(profile.gpu, price_per_hour=None))


def test_the_decision_says_what_to_buy_and_what_it_gives(two_models: Plan) -> None:
    """All GPUs and their price come first; each model has its servers, latency, room, and what other kinds take."""
    text = two_models.decision
    assert text.startswith("2 GPUs, $5.00 per hour.\n1 × cheap GPU (Llama-3.1-8B-Instruct, vLLM 0.8.5")
    assert f"{LLAMA.name} would take 1 GPU, $3.00 per hour.\n1 × H100 64GB (Qwen2.5-7B-Instruct, vLLM 0.8.5" in text
    assert text.count("holds to") == 2


def test_every_adapter_of_every_model_has_its_figures(two_models: Plan) -> None:
    """What an adapter gets is what a simulation of its server shows."""
    assert two_models.adapters is not None
    for item in two_models.bins:
        run = simulate(
            item.workload(two_models.workload), item.profile, max_loras=item.max_loras,
            max_lora_rank=item.max_lora_rank, seed=two_models.seed,
        )  # fmt: skip
        for i, mean_ms in zip(item.adapters, run.adapter_mean_ttft_ms, strict=True):
            assert two_models.adapters.mean_ttft_ms[i] == mean_ms


def test_the_parts_of_the_plan_fit_together(two_models: Plan) -> None:
    """Evaluations and room are in the order of the servers, and every adapter has one."""
    assert len(two_models.evaluations) == len(two_models.bins) == len(two_models.rooms) == len(two_models.headroom)
    placed = sorted(i for item in two_models.bins for i in item.adapters)
    assert placed == list(range(len(two_models.workload)))
    for row, item in zip(two_models.evaluations, two_models.bins, strict=True):
        assert row.offered_tok_s == pytest.approx(item.offered_tok_s(two_models.workload))


def test_the_error_of_an_estimate_is_said_beside_other_kinds() -> None:
    """A kind that was chosen by an estimated profile has the band of GPUs that the estimate may be off by."""
    cheap = estimate_profile(model_named("meta-llama/Llama-3.1-8B-Instruct"), "a100-80gb", price_per_hour=1.0)
    plan = recommend(fleet(6, (None,)), [priced(LLAMA, 3.0), cheap])
    assert {item.profile.name for item in plan.bins} == {cheap.name}
    assert plan.estimate_band == recommend(fleet(6, (None,)), cheap).estimate_band


def test_kinds_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two kinds and their mix gets an equal part of what is left; the plan says what ended it."""
    two, seen = [LLAMA, replace(LLAMA, name="other")], []

    def begun(*given: object, **options: object) -> Frontier:
        seen.append(options["time_limit_s"])
        return Frontier(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("packer.planning.kinds.Frontier", begun)
    clock = SimpleNamespace(monotonic=partial(next, iter((0.0, 0.0, 30.0, 50.0, 60.0, 60.0))))
    monkeypatch.setattr("packer.planning.kinds.time", clock)
    late = recommend(fleet(2, (None,)), two, time_limit_s=60.0, verify=False)
    assert seen == [20.0, 15.0, 10.0]
    assert (late.time_limit_reached, late.interrupted) == (True, False)
    monkeypatch.undo()
    calls = iter([False] * 20)
    stopped = recommend(fleet(2, (None,)), two, time_limit_s=60.0, stop=lambda: next(calls, True))
    assert (stopped.time_limit_reached, stopped.interrupted) == (False, True)
    assert not stopped.unplaced
    with pytest.raises(ValidationError, match="time limit"):
        recommend(fleet(2, (None,)), two, time_limit_s=0.0)


def test_a_plan_that_was_confirmed_goes_before_one_that_was_not(two_models: Plan) -> None:
    """A kind whose search ended early may need fewer GPUs only because fresh hours were not simulated."""
    whole = Option(None, "a", replace(two_models, verified=True), holds=True, told="")
    for ended in ("interrupted", "time_limit_reached"):
        few = {"bins": two_models.bins[:1], "verified": None, ended: True}
        assert whole.rank < replace(whole, plan=replace(two_models, **few)).rank  # type: ignore[arg-type]
        assert whole.rank > replace(whole, plan=replace(two_models, **few | {"verified": True})).rank  # type: ignore[arg-type]


def test_limits_on_gpus_need_an_objective() -> None:
    """A number of GPUs of several kinds is not a number."""
    kinds = [GpuKind(LLAMA), GpuKind(replace(LLAMA, name="other"))]
    with pytest.raises(IncompatibleError, match="go with an objective"):
        recommend(fleet(2, (None,)), kinds, max_gpus=2)
    with pytest.raises(IncompatibleError, match="one base model"):
        frontier(fleet(2, ("llama-3.1-8b-instruct", "qwen-2.5-7b-instruct")), [LLAMA, QWEN])
    with pytest.raises(IncompatibleError, match="serves the base model 'mistral'"):
        recommend(fleet(2, ("mistral",)), LLAMA)


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("broken", [True, False])
def test_a_mix_is_taken_that_holds_now_and_in_a_fresh_hour(
    holds: bool, broken: bool, toy_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the two hours is not enough."""
    plan = toy_plan(["a", "b"])
    first, second = plan.bins
    other = replace(second, profile=replace(second.profile, name="other"))
    monkeypatch.setattr(kinds, "solve", lambda *_args, **_more: replace(plan, bins=(first, other)))
    point = SimpleNamespace(plan=replace(plan, verified=None))
    job = SimpleNamespace(
        over=lambda: False, workload=plan.workload, margin=0.0, seed=0, remaining_s=lambda: 60.0, stop=lambda: False,
        put=lambda _bins: point, progress=silent, hours=None, replayed=False, spare=0, verify=True,
        kept=SimpleNamespace(holds=lambda *_: holds, broken_later=lambda *_: broken),
    )  # fmt: skip
    found = judged(kinds.Mix(cast("Any", job), profiles=[first.profile, other.profile]))
    assert found is not None
    assert found.verified == (holds and not broken)


def test_servers_without_which_a_mix_keeps_the_goal_leave_it() -> None:
    """A search that places parts of hot adapters may leave servers with little to do: others take their adapters."""
    small = small_profile()
    dear, cheap = (replace(priced(small, price), name=name) for name, price in (("dear", 3.0), ("cheap", 1.0)))
    own = Workload([Adapter(f"a{i}", 8, 0.3) for i in range(9)], name="own")
    made = [(dear, (0, 1, 2, 3), 0.5), (dear, (4, 5, 6, 7, 8), 1.0), (cheap, (0, 1), 0.5), (cheap, (2, 3), 0.5)]
    bins = [Bin(a, kind.settings(len(a), 8), kind, (share,) * len(a)) for kind, a, share in made]
    job = Frontier(own, dear, margin=0.0)
    mix = kinds.Mix(job, profiles=[dear, cheap], margins={dear: 0.0, cheap: 0.0})
    found = mix.judge(mix.put(bins), 0)
    assert found.verified
    assert (found.n_gpus, found.price_per_hour) == (2, 4.0)
    shares = np.zeros(9)
    for item in found.bins:
        shares[list(item.adapters)] += item.shares
    assert shares == pytest.approx(1.0)
    assert mix.judge(mix.put(found.bins), 0).bins == found.bins, "a mix has servers of two kinds"


def test_mixes_are_searched_for_throughput_then_within_the_goal(
    toy_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No mix is cheaper than that for throughput, which the goal may break; then the goal, with the fleet's own
    arrivals, decides, and at last throughput with larger margins."""
    plan = toy_plan(["a", "b"])
    first, second = plan.bins
    other = replace(second, profile=replace(second.profile, name="other"))
    asked = list[tuple[bool, float, str]]()

    def solved(fleet: Workload, *_args: Any, **more: Any) -> Plan:
        asked.append((more["slo"] is not None, more["margin"][other.profile], fleet.arrivals.kind))
        return replace(plan, bins=(first, other))

    monkeypatch.setattr(kinds, "solve", solved)
    point = SimpleNamespace(plan=replace(plan, verified=None))
    fleet = plan.workload.with_arrivals(Arrivals("unpredictable"))
    job = SimpleNamespace(
        over=lambda: False, workload=fleet, margin=0.1, seed=0, remaining_s=lambda: 60.0, stop=lambda: False,
        put=lambda _bins: point, progress=silent, hours=None, replayed=False, spare=0, verify=True,
        kept=SimpleNamespace(holds=lambda *_: True, broken_later=lambda *_: True),
    )  # fmt: skip
    offered = [first.profile, other.profile]
    judged(kinds.Mix(cast("Any", job), profiles=offered, margins=dict.fromkeys(offered, 0.1)))
    margins = [0.1, 0.1, *(pytest.approx(0.1 + more) for more in MIXED[1:])]
    assert asked == [(k == 1, margin, "unpredictable" if k == 1 else "poisson") for k, margin in enumerate(margins)]


def test_each_class_may_have_the_kind_that_is_cheapest_for_it(
    toy_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixes within the goal are also searched where one kind serves the most, but does not keep the goal alone, and for
    each class alone, without others on its servers; the cheaper mix is tried first."""
    plan = toy_plan(["a", "b"])
    dear, cheap = (
        replace(plan.bins[0].profile, name=name, gpu=replace(plan.bins[0].profile.gpu, price_per_hour=price))
        for name, price in (("dear", 5.0), ("cheap", 1.0))
    )
    adapters = (replace(plan.workload.adapters[0], slo_class="fast"), plan.workload.adapters[1])
    fleet = replace(plan.workload, adapters=adapters)

    def solved(own: Workload, *_args: Any, **more: Any) -> Plan:
        if more["slo"] is None:
            chosen = [cheap, cheap]
        else:
            chosen = [dear, cheap, dear] if len(own) == 2 else [dear if own.adapters[0].slo_class else cheap]
        places = [k % len(own) for k in range(len(chosen))]
        bins = [replace(plan.bins[0], adapters=(k,), profile=each) for k, each in zip(places, chosen, strict=True)]
        return replace(plan, bins=tuple(bins))

    monkeypatch.setattr(kinds, "solve", solved)
    tried = list[list[tuple[tuple[int, ...], str]]]()

    def put(bins: Sequence[Bin]) -> SimpleNamespace:
        tried.append([(item.adapters, item.profile.name) for item in bins])
        return SimpleNamespace(plan=replace(plan, verified=None))

    job = SimpleNamespace(
        over=lambda: False, workload=fleet, margin=0.0, seed=0, remaining_s=lambda: 60.0, stop=lambda: False,
        put=put, progress=silent, hours=None, replayed=False, spare=0, verify=True,
        kept=SimpleNamespace(holds=lambda *_: True, broken_later=lambda *_: True),
    )  # fmt: skip
    offered, margins = [dear, cheap], {dear: 0.0, cheap: 0.0}
    alone = [replace(item, profile=cheap) for item in plan.bins]
    assert judged(kinds.Mix(cast("Any", job), profiles=offered, margins=margins, kept=[alone])) is None
    assert not tried
    for kept in ([], [alone * 2]):  # a kind that keeps the goal alone, but with more servers than serve the load
        judged(kinds.Mix(cast("Any", job), profiles=offered, margins=margins, kept=kept))
        assert tried == [[((0,), "dear"), ((1,), "cheap")], [((0,), "dear"), ((1,), "cheap"), ((0,), "dear")]]
        tried.clear()


def test_a_mix_divides_an_adapter_that_is_too_hot_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts may be on servers of several kinds; parts on one server are one adapter there. While a mix is searched,
    which takes up to ten seconds each time, that is said instead of what was done before."""
    offered = [priced(LLAMA, 3.0), replace(priced(LLAMA, 2.0, "other"), name="other")]
    names = list[list[str]]()

    def solved(fleet: Workload, *_: Any, **_more: Any) -> Any:
        names.append(fleet.names)
        n = len(fleet)
        parts = zip((range(n - 2), range(n - 2, n)), offered, strict=True)
        bins = tuple(Bin(tuple(part), each.settings(len(part), 8), each) for part, each in parts)
        return SimpleNamespace(status=Status.FEASIBLE, bins=bins)

    monkeypatch.setattr(kinds, "solve", solved)
    monkeypatch.setattr(kinds.Mix, "judge", lambda _mix, plan, _number: replace(plan, verified=True))
    monkeypatch.setattr(kinds, "cheapest", lambda found: found[-1])
    bins = [Bin((0, 1), offered[0].settings(2, 8), offered[0])] * 9
    alone = SimpleNamespace(status=Status.FEASIBLE, bins=bins, price_per_hour=9.0, n_gpus=9, time_limit_reached=False)
    monkeypatch.setattr(kinds, "planned", lambda _task: alone)
    monkeypatch.setattr(kinds, "completed", lambda _mix, plan: plan)
    said = list[str]()
    fleet = Workload([Adapter("hot", 8, 50.0), Adapter("cold", 8, 0.1)])
    plan = recommend(fleet, offered, verify=False, progress=lambda what, *_: said.append(what))
    assert said[-1] == "searching for a cheaper mix of kinds"
    number = len(names[0]) - 1
    assert number > 1
    assert [item.adapters for item in plan.bins] == [(0,), (0, 1)]
    assert [item.shares[0] for item in plan.bins] == [(number - 1) / number, 1 / number]
