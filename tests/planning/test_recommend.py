"""The plan to deploy: fewest GPUs within a latency goal, and the frontier around it."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

import packer
from packer import Adapter, Lengths, Limits, Slo, Workload
from packer.arrival import Arrivals, RequestTrace
from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.io.plans import plan_to_dict
from packer.plan import Plan, Status
from packer.planning.explain import outcome
from packer.planning.explore import Frontier
from packer.planning.kept import SERVER_HOURS
from packer.planning.loop import judged, planned
from packer.planning.recommend import UNCONFIRMED, Deployment
from packer.profile import Profile
from packer.room import Room
from packer.solvers.candidates import beyond_measured
from packer.twin import hours
from packer.twin.margin import BAND_KEYS
from packer.twin.override import with_engine


@pytest.fixture(scope="module")
def plan(fleet: Workload, server: Profile) -> Plan:
    """The recommended plan."""
    return packer.recommend(fleet, server)


def test_every_adapter_keeps_the_goal_in_an_hour_that_was_not_seen(plan: Plan, fleet: Workload) -> None:
    """The plan is feasible, places every adapter, and holds in simulations with seeds of their own."""
    assert (plan.status, plan.verified, plan.unplaced) == (Status.FEASIBLE, True, ())
    assert sorted(i for item in plan.bins for i in item.adapters) == list(range(len(fleet)))
    for seed in (5, 6):
        for item in plan.bins:
            run = packer.simulate(
                item.workload(fleet), item.profile, max_loras=item.max_loras,
                max_lora_rank=item.max_lora_rank, seed=seed,
            )  # fmt: skip
            assert run.stable
            assert not run.starved
            assert np.nanmax(run.adapter_p95_ttft_ms) <= 2 * 2000
            assert np.nanmax(run.adapter_mean_itl_ms) <= 2 * 100


def test_fewer_gpus_break_the_goal(plan: Plan) -> None:
    """No point of the frontier below the recommended one keeps the goal in both hours."""
    frontier = plan.frontier
    below = [row for row in frontier if row["n_gpus"] < plan.n_gpus]
    assert all(not row["holds"] or row["broken_later"] for row in below)
    (own,) = [row for row in frontier if row["n_gpus"] == plan.n_gpus]
    assert own["holds"]
    assert own["price_per_hour"] == 2.5 * plan.n_gpus
    assert plan.decision.startswith(f"{plan.n_gpus} × H100 64GB (Llama-3.1-8B-Instruct, ")
    assert f"${2.5 * plan.n_gpus:.2f} per hour" in plan.decision


def test_too_few_gpus_at_hand_say_how_many_would_do(fleet: Workload, server: Profile, plan: Plan) -> None:
    """With fewer GPUs than needed the plan is infeasible and names the number that keeps the goal."""
    found = packer.recommend(fleet, server, max_gpus=1)
    assert found.status is Status.INFEASIBLE
    assert found.n_gpus == 1
    assert "GPUs keep the goal: --gpus " in found.reasons[0]
    assert int(found.reasons[0].split()[0]) <= plan.n_gpus


def test_rooms_and_adapters_say_what_the_servers_do(plan: Plan, fleet: Workload) -> None:
    """Each server has headroom, the limit that binds is named, and figures of adapters are those of their servers."""
    for room in plan.rooms:
        assert room.headroom is not None
        assert room.headroom >= 1.0
        assert room.limit
    assert plan.headroom == tuple(room.headroom for room in plan.rooms)
    assert plan.adapters is not None
    for k, item in enumerate(plan.bins):
        worst = plan.adapters.p95_ttft_ms[list(item.adapters)].max()
        assert worst == plan.evaluations.worst_adapter_ttft_ms[k]
    assert np.all(plan.adapters.slo_attainment > 0.9)


def test_a_share_of_the_adapters_may_break_their_limits(server: Profile) -> None:
    """Where one adapter in ten may break its limits, an impossible class does not keep the plan from holding."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.2, slo_class="instant" if k == 0 else None) for k in range(10)])
    strict = Slo(Limits(), (("instant", Limits(1.0, 1.0)),))
    assert packer.recommend(fleet, server, slo=strict).status is Status.INFEASIBLE
    loose = replace(strict, adapter_share=0.9)
    assert packer.recommend(fleet, server, slo=loose).n_gpus == 1
    hot = Workload([replace(each, rate=3.0 if k else 25.0) for k, each in enumerate(fleet.adapters)])
    several = packer.recommend(hot, server, slo=loose)
    assert several.status is Status.OPTIMAL
    assert several.n_gpus > 1
    again = packer.evaluate_plan(several)
    assert again.holds  # though most adapters of the server with the impossible one break theirs
    assert again.plan.evaluations.slo_used.max() > 1.0


def test_limits_that_a_predictor_does_not_know_are_named(plan: Plan) -> None:
    """A plan whose latency limits a tree can't evaluate is not said to keep them."""
    assert packer.evaluate_plan(plan, "twin").plan.reasons == ()
    (reason,) = packer.evaluate_plan(plan, "tree").plan.reasons
    assert reason.startswith("The latency limits are not evaluated")


def test_decision_names_what_fewer_gpus_would_give(plan: Plan, fleet: Workload, server: Profile) -> None:
    """Serving numbers of GPUs are shown with their latency, those that certainly starve as starving."""
    points = packer.frontier(fleet, server, max_gpus=2)
    last = replace(points[-1], n_gpus=9)
    fewer = [replace(points[-1], n_gpus=7, starving=(0,)), replace(points[-1], n_gpus=8)]
    rooms = (Room(1.21), Room(1.5))
    text = outcome(last, [*fewer, last], rooms, Slo(), breaking=None, needed=8.0)
    assert re.findall("holds to.*%", text) == ["holds to about +21 %"]
    assert "\n8 GPUs serve it with" in text
    assert text.endswith("\n7 GPUs starve.")
    cases = (fewer[:1], None, "keeps the goal"), (fewer, None, "serves the load"), (fewer, 3, "serves the load")
    for points, breaking, what in cases:  # what the plan does; beside GPUs that break the goal, serving the load
        text = outcome(last, [*points, last], rooms, Slo(), breaking=breaking, reachable=not breaking, needed=7.0)
        assert text.endswith(f"\nOn 7 GPUs no plan was found that {what}.")
    assert not math.isnan(last.p95_ttft_ms)
    one = replace(last, plan=replace(last.plan, workload=fleet.subset((0,))))
    assert ", worst adapter " in text
    assert "worst adapter" not in outcome(one, [one], rooms, Slo(), breaking=None)


def test_many_quiet_adapters_share_a_gpu(server: Profile) -> None:
    """The search is not bound to the number of adapters that was measured; a plan beyond it is marked. The plan attains
    a proven bound, so that it is optimal."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.002) for k in range(800)])
    found = packer.recommend(fleet, server)
    assert (found.status, found.n_gpus) == (Status.OPTIMAL, 1)
    assert "server 0: up to 800 adapters on one, beyond the 384 up to which" in found.reasons[0]
    many = beyond_measured(fleet, [*found.bins, found.bins[0]], 3)
    assert many == (found.reasons[0].replace("server 0", "servers 3, 4"),)


@pytest.mark.parametrize("share", [1.0, 0.99])
def test_a_plan_that_fresh_hours_break_to_the_end_is_none(
    server: Profile, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Where the last set of fresh hours breaks the plan, it is infeasible, says how many adapters break theirs, and so
    does its row among the numbers of GPUs; a share of the adapters that the goal has already is no advice."""
    monkeypatch.setattr("packer.planning.recommend.ROUNDS", 1)
    fleet = packer.read_workload("examples/workloads/azure-code-2023.csv").subset([0, 1, 2])
    found = packer.recommend(fleet, server, slo=packer.Slo(adapter_share=share))
    assert (found.status, found.verified) == (Status.INFEASIBLE, False)
    assert ("--slo adapter_share=0.99" in found.reasons[0]) is (share > 0.99)
    assert re.search(r": the goal breaks for [123] of 3 adapters in another hour, ", found.decision)
    assert [(row["holds"], row["broken_later"]) for row in found.frontier if row["n_gpus"] == found.n_gpus] == [
        (False, True)
    ]
    assert found.reasons[0].startswith("In another hour adapter 'adapter-00")


def test_a_goal_that_only_the_margin_breaks_says_so(server: Profile) -> None:
    """Where every adapter keeps its limits at the rates as given, the decision names the margin that breaks them."""
    fleet = Workload([Adapter("hot", 16, 70.0), Adapter("warm", 16, 3.0)])
    found = packer.recommend(fleet, server, max_gpus=2, margin=0.15)
    assert found.status is Status.INFEASIBLE
    assert found.adapters is not None
    assert (found.adapters.slo_used <= 1.0).all()
    decision = found.decision
    assert re.search(r": the goal breaks for \d of 2 adapters with rates raised by the margin", decision)
    assert found.reasons[-1].endswith("the goal with rates raised by the margin")


def test_a_goal_that_no_server_keeps_is_answered_with_what_can_be_kept(
    server: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frontier, what an idle server gives the adapter, and not 64 parts of every adapter tried."""
    fleet = Workload([Adapter(f"a{k}", 16, 0.4) for k in range(60)])
    simulated = []
    one = hours._run
    monkeypatch.setattr(hours, "_run", lambda *job, **more: simulated.append(job) or one(*job, **more))
    found = packer.recommend(fleet, server, slo=Slo.of(p95_ttft_ms=20.0))
    assert (found.status, found.n_gpus) == (Status.INFEASIBLE, 2)
    assert "breaks for 60 of 60 adapters, " in found.decision
    assert re.search(r"keeps it\.\n1 GPU .*\n2 GPUs or fewer are .* --slo p95_ttft_ms=200\.$", found.decision)
    assert re.search(r"p95 TTFT 20 ms cannot be met: an idle server needs \d\d\.\d ms", found.reasons[0])
    rows = found.frontier
    assert len(rows) > 2
    assert rows[-1]["p95_ttft_ms"] < rows[0]["p95_ttft_ms"]
    assert len({item.adapters for item, *_ in simulated if len(item.adapters) == 1}) == 1


def test_fewer_gpus_with_a_fine_ttft_say_what_they_break(plan: Plan, fleet: Workload, server: Profile) -> None:
    """A number of GPUs whose worst TTFT is within the limit names the limit that breaks, with the adapters' own
    figures."""
    (point, *_) = packer.frontier(fleet, server, max_gpus=2)
    few = replace(point, n_gpus=7, holds=False, broken_later=False, worst_adapter_ttft_ms=400.0, mean_itl_ms=90.0)
    chat = Slo(classes=(("chat", Limits(300.0)),))
    classed = replace(fleet, adapters=tuple(replace(each, slo_class="chat") for each in fleet.adapters))
    batch = Slo(classes=(("chat", Limits(15_000.0)),))
    for slo, worst_ms, itl_ms, words in (
        (Slo(), 400.0, 120.0, "\n7 GPUs break the goal: ITL up to 120 ms."),
        (Slo(), 400.0, 90.0, "\n7 GPUs break the goal with rates raised by the margin."),
        (chat, 400.0, 90.0, "\n7 GPUs break the goal of 40 of 40 adapters."),
        (batch, 3000.0, 90.0, "\n7 GPUs break the goal with rates raised by the margin."),
    ):
        assert few.plan.adapters is not None
        adapters = few.plan.adapters._replace(
            p95_ttft_ms=np.full(len(fleet), 400.0), mean_itl_ms=np.full(len(fleet), itl_ms)
        )
        plan_of = replace(few.plan, workload=classed, adapters=adapters)
        near = replace(few, plan=plan_of, worst_adapter_ttft_ms=worst_ms)
        text = outcome(replace(near, n_gpus=8, holds=True), [near], (), slo, breaking=None)
        assert text.endswith(words)


def test_prompts_that_begin_alike_have_a_plan(server: Profile) -> None:
    """Trees know no shared prefixes, and propose for the prompts that a cache leaves; fewer GPUs than without one."""
    prompts = Lengths.constant(1200)
    adapters = [Adapter(f"a{k}", 8, 1.2, prompts, shared_prefix_tokens=1000) for k in range(20)]
    today = with_engine(server, vllm_version="0.30")
    cached, apart = (
        packer.recommend(Workload([replace(a, shared_prefix_tokens=tokens) for a in adapters]), today)
        for tokens in (1000, 0)
    )
    assert cached.status is apart.status is Status.FEASIBLE
    assert cached.n_gpus < apart.n_gpus


def test_requests_to_the_base_model_have_a_plan(server: Profile) -> None:
    """Requests without an adapter are planned beside those with one, and alone."""
    for others in ((Adapter("a", 16, 0.5),), ()):
        found = packer.recommend(Workload([Adapter("base", 0, 1.0), *others]), server)
        assert (found.status, found.n_gpus) == (Status.OPTIMAL, 1)


def test_too_few_gpus_are_all_used(server: Profile) -> None:
    """Where even all GPUs at hand do not keep the goal, the nearest plan is on all of them."""
    found = packer.recommend(
        Workload([Adapter("hot", 8, 60.0, Lengths.constant(500), Lengths.constant(460))]), server, max_gpus=3
    )
    assert (found.status, found.n_gpus) == (Status.INFEASIBLE, 3)
    second = found.decision.splitlines()[1]
    assert re.match(r"\d\d% of the load is served: TTFT p95 ", second)  # of what is not served nothing is known


def test_an_hour_without_requests_is_told_in_words(server: Profile) -> None:
    """A fleet that hardly sends anything has no latency, and no nan is printed for one."""
    found = packer.recommend(Workload([Adapter("a", 8, 1e-6)]), server)
    said = found.decision
    assert said.startswith("1 × H100 64GB (Llama-3.1-8B-Instruct, vLLM 0.8.5; lengths assumed): ")
    assert said.endswith("No request completed in the simulated hour.")


def test_a_single_adapter_beyond_its_goal_has_a_plan(server: Profile) -> None:
    """Where one GPU is all that can be of use, and is not enough, the plan on it is given."""
    found = packer.recommend(Workload([Adapter("hot", 8, 60.0)]), server, max_replicas=1)
    assert (found.status, found.n_gpus) == (Status.INFEASIBLE, 1)
    assert "'hot'" in found.reasons[0]


def test_an_optimal_plan_stays_optimal_with_more_slots(server: Profile) -> None:
    """Servers with little room get more slots once the bound is known; their number stays."""
    task = Deployment(Frontier(Workload([Adapter(f"a{k}", 8, 0.2) for k in range(4)]), server))
    plan = task.prove(judged(task) or pytest.fail("no plan"))
    other = task.changed(plan, [item.with_slots(item.max_loras - 1) for item in plan.bins])
    assert other is not None
    assert (other.status, other.gap) == (plan.status, plan.gap) == (Status.OPTIMAL, 0.0)


def test_a_plan_that_fresh_hours_may_break_is_not_optimal(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose time was over before fresh hours is feasible and says so: they may take more GPUs than its bound."""
    task = Deployment(Frontier(Workload([Adapter("a", 8, 0.2)]), server))
    monkeypatch.setattr(task, "over", lambda: True)
    found = planned(task)
    assert (found.status, found.gap, found.reasons) == (Status.FEASIBLE, 0.0, (UNCONFIRMED,))


def test_answers_of_one_token_have_a_plan(server: Profile) -> None:
    """A fleet without gaps between tokens has an ITL of 0, of which no GPU more takes a tenth."""
    one = Lengths.constant(1)
    found = packer.recommend(Workload([Adapter(f"a{k}", 8, 1.0, None, one) for k in range(20)]), server)
    assert (found.status, found.n_gpus) == (Status.OPTIMAL, 1)
    assert "nan" not in found.decision


def test_figures_that_are_not_known_are_told_in_words(plan: Plan, fleet: Workload, server: Profile) -> None:
    """No nan is printed for an adapter whose server does not start, nor for answers of one token."""
    (point, *_) = packer.frontier(fleet, server, max_gpus=2)
    broken = replace(point, holds=False, worst_adapter_ttft_ms=math.nan)
    text = outcome(replace(broken, n_gpus=8), [broken], (), Slo(), breaking=1)
    assert text.count("worst adapter without an answer") == 1
    short = Workload([Adapter("a", 8, 0.05, None, Lengths.constant(1))])
    found = packer.recommend(short, server, slo=Slo(Limits(1.0, 1.0)))
    assert found.status is Status.INFEASIBLE
    assert re.fullmatch(r"p95 TTFT 1 ms cannot be met: an idle server needs [\d.]+ ms for .*", found.reasons[0])


def test_a_replayed_trace_has_a_plan_without_room(server: Profile) -> None:
    """Requests that are replayed as they were can't grow: the plan keeps the goal, and no room is shown."""
    count = 400
    ones = np.ones(count, dtype=np.int64)
    trace = RequestTrace(np.arange(count) * 0.5, np.arange(count) % 4, 200 * ones, 50 * ones)
    fleet = Workload([Adapter(f"a{k}", 8, 0.5) for k in range(4)], arrivals=Arrivals("trace", trace=trace))
    found = packer.recommend(fleet, server)
    assert (found.status, found.n_gpus, found.rooms) == (Status.OPTIMAL, 1, ())
    assert "holds to" not in found.decision
    assert (found.margin, found.verified) == (None, None)
    assert found.reasons[-1].startswith("Requests are replayed as they were")
    assert packer.solve(fleet, server).rooms == ()


def test_servers_on_several_gpus_and_estimates(server: Profile) -> None:
    """Servers on two GPUs count as two, fewer GPUs than one takes are refused; an estimate says what its error does."""
    pair = replace(
        server,
        engine=replace(server.engine, tensor_parallel_size=2),
        calibrated=False,
        errors=dict(zip(BAND_KEYS, (0.4, 1.25), strict=True)),
    )
    busy = Workload([Adapter(f"a{k}", 16, 3.0) for k in range(6)])
    found = packer.recommend(busy, pair, verify=False)
    assert (found.status, found.gap) == (Status.OPTIMAL, 0.0)
    assert found.n_gpus == 2 * len(found.bins)
    assert found.decision.startswith(f"{found.n_gpus} × H100 64GB as 1 server of 2 (")
    rows = found.frontier
    assert all(row["n_gpus"] % 2 == 0 for row in rows)
    band = found.estimate_band
    assert band["fewest"]["gpus"] <= found.n_gpus < band["most"]["gpus"]
    assert [point.n_gpus for point in packer.frontier(busy, pair, max_gpus=5)] == [2, 4]
    with pytest.raises(IncompatibleError, match="at least 2 GPUs"):
        packer.recommend(busy, pair, max_gpus=1)


def test_a_search_that_was_cut_short_does_not_say_infeasible(server: Profile) -> None:
    """Nothing says that there is no plan: the outcome is that none was found in time, with what is known."""
    fleet = Workload([Adapter(f"a{k}", 16, 0.9) for k in range(200)])
    found = packer.recommend(fleet, server, time_limit_s=0.01)
    assert (found.status, found.found_in_time) == (Status.INFEASIBLE, False)
    assert found.outcome == "no plan found in time"
    assert plan_to_dict(found)["found_in_time"] is False
    assert any("longer --time-limit" in reason for reason in found.reasons)
    few = packer.recommend(fleet, server, time_limit_s=0.01, max_gpus=1).reasons
    assert any("goal: more GPUs, " in reason for reason in few), "no time is long enough for one GPU"
    assert packer.recommend(fleet.subset([0, 1]), server, max_gpus=1).found_in_time


@pytest.mark.parametrize(("cv", "hours"), [(0.5, [1, 1]), (4.0, [SERVER_HOURS, SERVER_HOURS / 2])])
def test_irregular_gaps_are_bursts(server: Profile, cv: float, hours: list[int]) -> None:
    """Log-normal gaps more irregular than Poisson's get as many fresh hours as bursts do: the more, the fewer servers.

    Each set of hours is another one.
    """
    fleet = Workload([Adapter(name, 16, 0.5) for name in "ab"], arrivals=Arrivals("lognormal", cv=cv))
    kept = Frontier(fleet, server).kept
    each = tuple(Bin((k,), server.settings(1, 16), server) for k in range(2))
    assert [len(kept.fresh(bins)) for bins in (each[:1], each)] == hours
    seeds = [hour.seed for number in range(3) for hour in kept.fresh(each, number)]
    assert len(set(seeds)) == len(seeds)


def _in_clumps(adapters: int, every_s: float, each: int) -> RequestTrace:
    """An hour in which every adapter sends `each` requests at once."""
    at_s = np.repeat(np.arange(0.0, 3600.0, every_s), each * adapters)
    own = np.tile(np.repeat(np.arange(adapters), each), round(3600 / every_s))
    inputs, outputs = np.full(len(at_s), 1000), np.full(len(at_s), 20)
    return RequestTrace(at_s, own, inputs, outputs, end_s=3600.0)


def _steady(adapters: int) -> Workload:
    lengths = Lengths.constant(1000), Lengths.constant(20)
    return Workload([Adapter(f"a{k}", 8, 0.2, *lengths) for k in range(adapters)])


def test_the_requests_of_a_log_keep_the_goal_as_they_were(server: Profile) -> None:
    """Clumps of requests that random arrivals of the same rates do not have take more GPUs if they are in the log: the
    plan keeps the goal when they are replayed, and one GPU fewer does not."""
    fleet, log = _steady(20), _in_clumps(20, 30.0, 6)
    without, found = (packer.recommend(fleet, server, log_hour=hour) for hour in (None, log))
    assert without.n_gpus < found.n_gpus
    said = "The requests of the log's hour, replayed as they were, keep the goal."
    assert (found.verified, said in found.reasons) == (True, True)
    held = [
        packer.simulate_cluster(fleet.replaying(log), plan.cluster(), router="plan").slo_used <= 1.0
        for plan in (without, found)
    ]
    assert held == [False, True]
    assert f"{found.n_gpus - 1} GPUs break the goal in another hour: requests of the log, replayed," in found.decision


def test_a_log_that_no_plan_keeps_is_told(server: Profile) -> None:
    """If the requests of a log break the goal on any number of GPUs, the plan is that of drawn hours, and says so."""
    fleet = _steady(3).held_to("p95_ttft_ms=200")
    log = _in_clumps(3, 1200.0, 400)
    without = packer.recommend(fleet, server, max_replicas=1)
    found = packer.recommend(fleet, server, max_replicas=1, log_hour=log)
    assert (found.n_gpus, found.verified) == (without.n_gpus, True)
    assert "40 min of the log, replayed as they were, break the goal of 3 of 3 adapters" in " ".join(found.reasons)
    assert not any("replayed" in reason for reason in without.reasons)
