"""A run ends with a verdict on the goal that agrees with its figures and names what limits the server."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster
from packer.goal import Goal
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.cluster.routers.base import HOLD, AnyCluster
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.limits import BEFORE_TRAFFIC
from packer.twin.override import with_engine
from packer.twin.simulate import simulate
from packer.twin.verdict import verdict_of, verdict_of_all
from packer.workload import Workload


def fleet(n: int, rate: float) -> Workload:
    """Adapters of rank 8."""
    return Workload([Adapter(f"a{k}", 8, rate) for k in range(n)])


def test_what_keeps_its_goal_says_so(toy_profile: Profile) -> None:
    """Each limit stands beside the figure that is nearest to it."""
    found = verdict_of(simulate(fleet(2, 0.05), toy_profile, max_loras=2, duration_s=600))
    assert found.holds
    assert found.cause is None
    assert [each.key for each in found.limits] == ["p95_ttft_ms", "mean_itl_ms"]
    assert all(each.kept and each.value_ms <= each.limit_ms for each in found.limits)
    assert "keeps p95 TTFT 2 s (" in found.text
    assert "None" not in found.text


def test_what_was_not_measured_is_not_0_ms(toy_profile: Profile) -> None:
    """A server without requests has no latencies, and whole jobs have no gaps between tokens."""
    idle = simulate(fleet(1, 0.0), toy_profile, max_loras=1, duration_s=60)
    jobs = simulate_cluster(fleet(1, 1.0), Cluster.of(toy_profile, 1, max_loras=1), "rrod", duration_s=60)
    assert "p95 TTFT 2 s (none measured) and mean ITL 100 ms (none measured)" in verdict_of(idle).text
    assert "mean ITL 100 ms (none measured)" in verdict_of(jobs).text


def test_requests_that_still_run_are_not_lost(toy_profile: Profile) -> None:
    """Less than all of the load is served because requests are unfinished at the end, not because some are refused."""
    run = simulate(fleet(2, 0.5), toy_profile, max_loras=2, duration_s=3600)
    assert run.completed < run.sent
    assert re.match(r"Serves 99\.\d % \(the rest is unfinished at the end\), keeps", verdict_of(run).text)
    full = simulate(fleet(2, 0.5), toy_profile, max_loras=2, duration_s=3600, max_outstanding=3)
    assert full.refused
    assert "unfinished" not in verdict_of(full).text


def test_slots_that_are_too_few_are_named(toy_profile: Profile) -> None:
    """Many adapters behind one slot wait for it; one adapter alone would not."""
    run = simulate(fleet(12, 0.2), toy_profile, max_loras=1, duration_s=900)
    found = verdict_of(run)
    assert not found.holds
    assert found.cause is not None
    assert found.cause.name in ("slots", "loading")
    assert "breaks p95 TTFT 2 s (" in found.text
    assert "12 of 12 adapters" in found.text
    assert found.to_dict()["cause"]["advice"]


def test_an_adapter_without_answers_keeps_no_limit(server: Profile) -> None:
    """An adapter that never gets a slot is beyond its TTFT limit; the others' latencies say nothing of the goal."""
    busy = Workload([Adapter("a", 8, 4.0), Adapter("b", 8, 3.0), Adapter("c", 8, 2.0)])
    run = simulate(busy, server, max_loras=2, duration_s=600, seed=0)
    assert 0 in run.completed_of
    assert verdict_of(run).text.startswith("Starves: serves ")
    assert "keeps" not in verdict_of(run).text
    ttft = verdict_of(run).limits[0]
    answered = run.per_adapter.filter(run.per_adapter["completed"] > 0)
    assert ttft.beyond == 1 + (answered["p95_ttft_ms"] > ttft.limit_ms).sum()
    assert ttft.limit_ms < ttft.value_ms <= 600e3
    assert not ttft.kept


@pytest.mark.parametrize(
    "slo", ["ttft_ms=1,request_share=0.9", "server.p99_ttft_ms=1", "p95_ttft_ms=1", "mean_itl_ms=1"]
)
def test_the_verdict_agrees_with_how_much_of_the_goal_is_used(toy_profile: Profile, slo: str) -> None:
    """A run holds if and only if it uses no more than its limits, at every level of limits."""
    for limit in (slo, slo.replace("=1", "=100000", 1)):
        run = simulate(fleet(3, 0.1), toy_profile, max_loras=3, duration_s=600, slo=limit)
        assert verdict_of(run).holds == (run.slo_used <= 1.0) == (limit != slo)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        ({"ttft_ms": 1.0, "tpot_ms": 1e6}, [False, True]),
        ({"ttft_ms": 1e6, "tpot_ms": 1.0}, [True, False]),
        ({"ttft_ms": 1.0, "tpot_ms": 1.0}, [False, False]),
        ({"ttft_ms": 1e6, "tpot_ms": 1e6}, [True, True]),
    ],
)
def test_each_limit_of_requests_is_judged_alone(toy_profile: Profile, slo: dict[str, float], kept: list[bool]) -> None:
    """Of several limits of requests the verdict names those that too few requests keep, each with its own share."""
    found = verdict_of(simulate(fleet(3, 0.1), toy_profile, max_loras=3, duration_s=600, slo=slo))
    assert [each.kept for each in found.limits] == kept
    assert found.holds == all(kept)
    said = found.text.partition("breaks ")[2].partition(":")[0]
    assert ["TTFT" not in said, "TPOT" not in said] == kept
    assert said.count(" % of the requests)") == kept.count(False)


def test_limits_of_requests_that_only_break_together_are_named_together(toy_profile: Profile) -> None:
    """If enough requests keep each limit and too few keep all, the verdict names all of them, with one share."""
    run = simulate(fleet(3, 0.2), toy_profile, max_loras=1, duration_s=600)
    slo = {"ttft_ms": float(np.quantile(run.ttft_ms, 0.9)), "tpot_ms": float(np.quantile(run.tpot_ms, 0.9))}
    goal = Goal.only({**slo, "request_share": 0.85})
    found = verdict_of(replace(run, workload=replace(run.workload, slo=goal)))
    assert [each.kept for each in found.limits] == [False, False]
    assert f"breaks {goal.limits} (" in found.text


@pytest.mark.parametrize(
    ("concurrency", "limit_ms", "cause", "outstanding"),
    [(3000, 2000.0, "step time", "3,000 requests outstanding, 834 running"),
     (100, 20.0, "concurrency", "100 requests outstanding, 99 running"),
     (1, 20.0, "step time", "1 request outstanding, 1 running")],
)  # fmt: skip
def test_a_closed_loop_of_too_many_requests_is_not_limited_by_its_start_or_bursts(
    concurrency: int, limit_ms: float, cause: str, outstanding: str
) -> None:
    """As many requests as the client keeps open are sent at once: what is outstanding and what runs is said."""
    crowd = replace(fleet(3, 0.5), slo=Goal.of(limit_ms, 100.0))
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    found = verdict_of(simulate(crowd, profile, max_loras=3, duration_s=300.0, concurrency=concurrency))
    assert not found.holds
    assert found.cause is not None
    assert found.cause.name == cause
    assert found.cause.advice != BEFORE_TRAFFIC
    assert outstanding in found.text


@pytest.mark.parametrize("client", [{"concurrency": 1, "paced": True}, {"max_outstanding": 1}])
def test_a_client_that_keeps_requests_from_an_idle_server_is_named(
    toy_profile: Profile, client: dict[str, Any]
) -> None:
    """Where the client's limit of open requests leaves the server room, it is the cause, on a cluster, too."""
    runs = [
        simulate(fleet(2, 2.0), toy_profile, max_loras=2, duration_s=300, **client),
        simulate_cluster(fleet(2, 2.0), Cluster.of(toy_profile, 2, max_loras=2), duration_s=300, **client),
    ]
    for run in runs:
        found = verdict_of(run)
        assert run.starved
        assert found.cause is not None
        assert found.cause.name == "client"
        assert "client, it keeps at most 1 request open and " in found.text
        assert found.cause.advice == f"a higher {next(iter(client))}"


@pytest.mark.parametrize("paced", [True, False])
def test_kept_times_of_a_paced_client_say_where_they_begin(toy_profile: Profile, paced: bool) -> None:
    """Requests that waited at the client have their TTFT from when they were sent: the verdict that it is kept says so,
    and so does the JSON."""
    client: dict[str, Any] = {"concurrency": 8, "paced": True} if paced else {}
    found = verdict_of(simulate(fleet(2, 0.2), toy_profile, max_loras=2, duration_s=300, **client))
    assert found.holds
    said = "Times count from when the client sends a request, without its wait there for a place."
    assert (said in found.text, said in found.to_dict()["text"]) == (paced, paced)


def test_a_full_server_is_named_whatever_its_client_refuses(toy_profile: Profile) -> None:
    """Where requests wait in the server, its resources are the cause, though the client refuses more."""
    run = simulate(fleet(12, 2.0), toy_profile, max_loras=1, duration_s=300, max_outstanding=200)
    found = verdict_of(run)
    assert run.refused > 100
    assert found.cause is not None
    assert found.cause.name in ("slots", "loading")


def test_a_server_that_does_not_start_breaks_the_goal(toy_profile: Profile) -> None:
    """Nothing is measured there, and the reason is the verdict."""
    found = verdict_of(simulate(fleet(3, 0.1), toy_profile, max_loras=100_000, duration_s=60))
    assert not found.holds
    assert found.text.startswith("Does not start")


def test_of_several_runs_the_worst_speaks(toy_profile: Profile) -> None:
    """The sentence counts the seeds that keep the goal and describes the one furthest beyond it."""
    runs = [simulate(fleet(2, rate), toy_profile, max_loras=2, duration_s=600) for rate in (0.05, 400.0)]
    found = verdict_of_all(runs)
    assert not found.holds
    assert found.text.startswith("1 of 2 seeds keep the goal; the worst: Starves")


def test_a_cluster_names_the_server(toy_profile: Profile) -> None:
    """Of a cluster the server that is furthest beyond the goal is said, with what limits it."""
    cluster = Cluster.of(toy_profile, 2, max_loras=1, max_lora_rank=8)
    found = verdict_of(simulate_cluster(fleet(12, 0.4), cluster, router="round-robin", duration_s=600))
    assert not found.holds
    assert ": server " in found.text


class Holding(AnyCluster):
    """A router that gives no server a request."""

    name = "holding"

    def start(self, *_given: object) -> None:
        """Nothing to prepare."""

    def route(self, *_given: object) -> int:
        """Hold it."""
        return HOLD


def test_a_router_that_holds_everything_is_named(toy_profile: Profile) -> None:
    """Servers that get no request limit nothing."""
    cluster = Cluster.of(toy_profile, 2, max_loras=1, max_lora_rank=8)
    found = verdict_of(simulate_cluster(fleet(12, 0.4), cluster, router=Holding(), duration_s=60))
    assert found.text.endswith(": router, it gives no request to a server.")


@pytest.mark.parametrize(("n", "rate", "slots"), [(60, 0.07, 32), (80, 0.1, 40)])
def test_more_slots_are_advised_only_if_they_help(server: Profile, n: int, rate: float, slots: int) -> None:
    """The slots of both servers are all in use. Half as many more help one of them; they take so much of the KV cache
    of the other, which has more load, that it breaks the goal by as much."""
    long = Lengths.gamma(1155.0, cv=1.0), Lengths.gamma(211.0, cv=1.0)
    busy = Workload([Adapter(f"a{k}", 32, rate) for k in range(n)], *long)
    now, more = (simulate(busy, server, max_loras=each, duration_s=900.0) for each in (slots, slots * 3 // 2))
    helps = more.slo_used < 0.9 * now.slo_used or more.served_share > now.served_share + 0.01
    cause = verdict_of_all([now]).cause
    assert cause is not None
    assert (cause.name, helps) == ("slots", n == 60)
    assert cause.advice == (f"max_loras {slots * 3 // 2}" if helps else "fewer adapters per GPU")


@pytest.mark.parametrize(("rate", "prompt", "answer"), [(0.017, 4000.0, 800.0), (0.07, 100.0, 300.0)])
def test_more_sequences_are_advised_only_if_they_help(
    server: Profile, rate: float, prompt: float, answer: float
) -> None:
    """A batch of 32 requests is full. Twice as many short requests at once are served faster; so many long ones do not
    fit into the KV cache, and are preempted."""
    own = with_engine(server, max_num_seqs=32)
    long = Lengths.gamma(prompt, cv=1.0), Lengths.gamma(answer, cv=1.0)
    busy = Workload([Adapter(f"a{k}", 32, rate) for k in range(60)], *long)
    now, more = (
        simulate(busy, each, max_loras=60, duration_s=600.0) for each in (own, with_engine(own, max_num_seqs=64))
    )
    helps = more.served_share > now.served_share + 0.01 or more.slo_used < 0.9 * now.slo_used
    cause = verdict_of_all([now]).cause
    assert cause is not None
    assert (cause.name, helps) == ("batch", rate == 0.07)
    assert cause.advice == ("max_num_seqs 64" if helps else "fewer requests per GPU")


def test_more_slots_help_a_closed_loop_that_gets_more_answers(server: Profile) -> None:
    """A closed loop sends as much as the server answers: slots help it if they serve more tokens, although the adapter
    that waits longest waits about as long."""
    busy = Workload([Adapter(f"a{k}", 8, 0.1) for k in range(20)])
    now, more = (simulate(busy, server, max_loras=each, concurrency=256, duration_s=600.0) for each in (8, 12))
    assert more.total_token_throughput > 1.1 * now.total_token_throughput
    assert (now.served_share, more.served_share) == (1.0, 1.0)
    assert more.slo_used > 0.9 * now.slo_used
    cause = verdict_of_all([now]).cause
    assert cause is not None
    assert (cause.name, cause.advice) == ("slots", "max_loras 12")
