"""What a plan says of fewer GPUs: which hour breaks the goal, when in it, and for which weaker goal they are enough."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import packer
from packer import Adapter, Bin, Workload
from packer.arrival import Arrivals, Bursts
from packer.fit.estimate import estimate_profile
from packer.lengths import Lengths
from packer.plan import Plan
from packer.planning import shortfall
from packer.planning.explore import Frontier
from packer.planning.kept import Hour, KeptHours
from packer.planning.shortfall import (
    AFTER_START,
    _when,
    busy_words,
    by_splits,
    context_words,
    start_words,
    version_words,
    weaker_words,
)  # fmt: skip
from packer.profile import Profile
from packer.room import LEVELS, Room
from packer.twin.hours import Hours
from packer.twin.limits import limit_of
from packer.twin.memory.starts import largest_max_loras
from packer.twin.override import with_engine


@pytest.fixture(scope="module")
def qwen() -> Profile:
    """A server whose API server takes some 0.3 s for the first request of an adapter."""
    return packer.load_profile("h100-64gb/qwen-2.5-7b-instruct")


@pytest.fixture(scope="module")
def quiet() -> Workload:
    """Adapters for one GPU, if their first requests did not come together after a start."""
    rates = np.random.default_rng(7).lognormal(np.log(0.03), 1.0, 214)
    fleet = Workload([Adapter(f"a{k}", 8 if k % 2 else 16, float(each)) for k, each in enumerate(rates)])
    return fleet.scaled(10.0 / fleet.rate)


@pytest.fixture(scope="module")
def plan(quiet: Workload, qwen: Profile, short_runs: Callable[..., AbstractContextManager[None]]) -> Plan:
    """The plan recommended by whole hours."""
    with short_runs(1.0):
        return packer.recommend(quiet, qwen)


@pytest.mark.usefixtures("whole_hours")
def test_a_start_that_decides_is_told_with_what_would_be_enough_without(
    plan: Plan, quiet: Workload, qwen: Profile
) -> None:
    """The first minutes cost a GPU: the decision says so, and names the weaker goals with the GPUs that a plan for them
    takes, or one for a server without that delay."""
    text = plan.decision
    assert plan.n_gpus == 2
    assert re.search(r"breaks the goal .*: requests wait up to \d+\.\d s in the first \d0 s after a start\.", text)
    weaker = plan.statistics["weaker_goals"]
    assert isinstance(weaker, dict)
    assert set(weaker.values()) == {1}
    assert "all but the first minutes after a start" in weaker
    assert text.splitlines()[-2:] == [weaker_words(weaker), version_words(weaker, qwen)]
    saved_ms = qwen.frontend.first_use_ms
    assert f"In vLLM 0.11 and later (--vllm-version) the first use of an adapter takes {saved_ms:g} ms less; " in text
    share = float(re.findall(r"adapter_share=([\d.]+)", weaker_words(weaker))[0])
    assert packer.recommend(quiet, qwen, slo=packer.Slo(adapter_share=share)).n_gpus == 1
    later = with_engine(qwen, vllm_version="0.11.0")
    assert packer.recommend(quiet, later).n_gpus == 1
    assert version_words(weaker, later) == ""
    assert text.endswith("; --warm-start true plans for servers that have answered a request to each adapter.")
    assert packer.recommend(quiet, with_engine(qwen, warm_start=True)).n_gpus == 1


@pytest.mark.usefixtures("whole_hours")
def test_quiet_adapters_of_a_server_that_starts_keep_twice_their_limit(
    plan: Plan, quiet: Workload, qwen: Profile
) -> None:
    """Which adapters with few requests have one while a server loads all of them is chance: the plan is for all hours,
    and none of them is beyond twice its limit in hours that were not seen."""
    assert plan.verified
    for seed in range(910_001, 910_007):
        for item in plan.bins:
            run = packer.simulate(
                item.workload(quiet), qwen, max_loras=item.max_loras, max_lora_rank=item.max_lora_rank, seed=seed
            )
            assert run.adapter_p95_ttft_ms.max() <= 2 * 2000.0


@pytest.mark.usefixtures("whole_hours")
def test_the_narrowest_of_several_wider_ttft_limits_is_named(server: Profile) -> None:
    """Where fewer GPUs keep five times the limit, but not 2.5 times, that is said; and it is true."""
    fleet = Workload([Adapter(f"a{i}", (8, 32)[i % 2], 0.055) for i in range(40)])
    fleet = replace(fleet, input_tokens=Lengths.gamma(mean=5000.0, cv=0.7), output_tokens=Lengths.constant(150))
    found = packer.recommend(fleet, server)
    assert (found.n_gpus, found.statistics["weaker_goals"]) == (2, {"--slo p95_ttft_ms=10000": 1})
    assert packer.recommend(fleet, server, slo="p95_ttft_ms=10000").n_gpus == 1
    assert packer.recommend(fleet, server, slo="p95_ttft_ms=5000").n_gpus == 2


def test_a_weaker_goal_is_not_nearly_broken(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of which servers use 98 % at the rates as given is not named: a plan for it is judged in further hours,
    since another hour may break it. At raised rates that is enough."""
    job = Frontier(Workload([Adapter("a", 8, 1.0)]), server)
    bins = job.at(1).plan.bins
    monkeypatch.setattr(KeptHours, "used", lambda *_: [2.45])
    assert "--slo p95_ttft_ms=5000" in shortfall._kept(job, bins, job.kept.planned)
    given = shortfall._kept(job, bins, job.kept.given)
    assert "--slo p95_ttft_ms=5000" not in given
    assert "--slo p95_ttft_ms=10000" in given


def test_a_wider_ttft_is_no_way_out_of_another_limit(server: Profile) -> None:
    """Where a limit of whole answers takes a GPU, no goal is named that would drop it and widen the TTFT instead: the
    limit itself is widened, and such a plan takes no more GPUs than is said."""
    fleet = Workload([Adapter("a", 16, 2.8), Adapter("b", 8, 1.5), Adapter("c", 16, 0.4)])
    found = packer.recommend(fleet, server, slo="p95_e2e_ms=9000")
    assert found.n_gpus > 1
    weaker = found.statistics["weaker_goals"]
    assert all(goal.startswith(("--slo adapter_share", "--slo p95_e2e_ms")) for goal in weaker)
    (wider,) = (goal for goal in weaker if goal.startswith("--slo p95_e2e_ms"))
    assert packer.recommend(fleet, server, slo=wider.removeprefix("--slo ")).n_gpus <= weaker[wider]


@pytest.mark.parametrize(("ttft_ms", "used", "wider"), [(900.0, 2.0, True), (900.0, 2.5, False), (1.0, 2.0, False)])
def test_a_limit_is_not_widened_where_another_breaks(
    server: Profile, monkeypatch: pytest.MonkeyPatch, ttft_ms: float, used: float, wider: bool
) -> None:
    """A wider limit of whole answers is named only if no TTFT is late, and if servers use no more of the limits than
    the adapters do: what else breaks is not known."""
    job = Frontier(Workload([Adapter("a", 8, 1.0)]).held_to(f"p95_e2e_ms=1500,p95_ttft_ms={ttft_ms}"), server)
    bins = job.at(1).plan.bins
    figures = job.kept.adapters(bins, job.kept.planned)._replace(slo_used=np.array([2.0]))
    monkeypatch.setattr(KeptHours, "adapters", lambda *_: figures)
    monkeypatch.setattr(KeptHours, "used", lambda *_: [used])
    assert any("p95_e2e_ms" in goal for goal in shortfall._kept(job, bins, job.kept.planned)) is wider


@pytest.mark.usefixtures("whole_hours")
def test_a_plan_beyond_a_goal_that_no_gpus_keep_keeps_a_weaker_one() -> None:
    """Where no number of GPUs keeps the goal, the plan has as many as the weaker goal takes that is named: it had two,
    and three were said to be enough for ten times the limit."""
    rates = np.random.default_rng(0).lognormal(0.0, 0.5, 400)
    adapters = [Adapter(f"a{i}", (8, 16, 32)[i % 3], 4 * r) for i, r in enumerate((rates / rates.sum()).tolist())]
    fleet = Workload(adapters, Lengths.gamma(mean=300, cv=0.7), Lengths.gamma(mean=200, cv=0.7))
    h100 = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    found = packer.recommend(fleet, h100, slo="p95_ttft_ms=40")
    assert found.statistics["weaker_goals"] == {"--slo p95_ttft_ms=400": found.n_gpus}


@pytest.mark.parametrize(("ttft_ms", "itl_ms"), [(900.0, 30.0), (900.0, 20.0), (3000.0, 20.0), (3000.0, 30.0)])
def test_of_ttft_and_itl_the_limit_that_breaks_is_widened(
    server: Profile, monkeypatch: pytest.MonkeyPatch, ttft_ms: float, itl_ms: float
) -> None:
    """Where only the ITL breaks, a wider limit of it is named, and where only the TTFT does, one of that."""
    job = Frontier(Workload([Adapter("a", 8, 1.0)]).held_to("mean_itl_ms=25"), server)
    bins, used = job.at(1).plan.bins, max(ttft_ms / 2000.0, itl_ms / 25.0)
    figures = job.kept.adapters(bins, job.kept.planned)
    figures = figures._replace(
        slo_used=np.array([used]), p95_ttft_ms=np.array([ttft_ms]), mean_itl_ms=np.array([itl_ms])
    )
    monkeypatch.setattr(KeptHours, "adapters", lambda *_: figures)
    monkeypatch.setattr(KeptHours, "used", lambda *_: [used])
    kept = shortfall._kept(job, bins, job.kept.planned)
    assert any("p95_ttft_ms" in goal for goal in kept) is (itl_ms <= 25.0)
    assert ("--slo mean_itl_ms=31.25" in kept) is (ttft_ms <= 2000.0)


@pytest.mark.parametrize(("broken", "goals"), [((), {"--slo p95_ttft_ms=5000": 3}), ((2,), {})])
def test_a_weaker_goal_is_kept_in_each_fresh_hour(
    broken: tuple[int, ...], goals: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for the weaker goal has to keep it in the whole set of fresh hours, of which any may break it."""
    monkeypatch.setattr(
        shortfall, "_kept", lambda _job, _bins, hour: set() if hour in broken else {"--slo p95_ttft_ms=5000"}
    )
    kept = SimpleNamespace(given=0, planned=0, hours=[0], fresh=lambda _bins, _number: [1, 2])
    points = [SimpleNamespace(n_gpus=3, holds=False, plan=SimpleNamespace(bins=()))]
    job = SimpleNamespace(
        spare=0, workload=Workload([Adapter("a", 8, 1.0)]), points=points, over=lambda: False, kept=kept,
        replayed=False, number=0,
    )  # fmt: skip
    best = SimpleNamespace(n_gpus=4, holds=True)
    assert shortfall.weaker_goals(cast("Any", job), cast("Any", best)) == goals


def test_no_hours_are_simulated_for_limits_wider_than_those_that_fewer_gpus_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A goal near what an idle server needs has plans on hundreds of GPUs: each kept wider limits in all hours anew."""
    looked = list[tuple[int, int]]()

    def kept_goals(_job: object, bins: tuple[int, ...], hour: int) -> set[str]:
        looked.append((len(bins), hour))
        return {f"--slo p95_ttft_ms={limit}" for limit in (10000, 20000)}

    monkeypatch.setattr(shortfall, "_kept", kept_goals)
    kept = SimpleNamespace(given=0, planned=1, hours=[2], fresh=lambda _bins, _number: [3, 4])
    points = [SimpleNamespace(n_gpus=n, holds=False, plan=SimpleNamespace(bins=(0,) * n)) for n in (1, 2)]
    job = SimpleNamespace(
        spare=0, workload=Workload([Adapter("a", 8, 1.0)]), points=points, over=lambda: False, kept=kept,
        replayed=False, number=0,
    )  # fmt: skip
    best = SimpleNamespace(n_gpus=9, holds=True)
    assert shortfall.weaker_goals(cast("Any", job), cast("Any", best)) == {"--slo p95_ttft_ms=10000": 1}
    assert looked == [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0)]


def test_goals_that_one_number_of_gpus_keeps_are_told_together() -> None:
    """Goals are listed by the GPUs that are enough for them; without any nothing is said."""
    assert weaker_words({}) == ""
    assert (
        weaker_words({"A": 4, "B": 1, "C": 4, "D": 4})
        == "1 GPU is enough for B; 4 GPUs or fewer are enough for A, C or D."
    )
    assert weaker_words({"A": 2, "B": 4}, 2) == "2 GPUs are enough for A; 4 GPUs or fewer are enough for B."
    assert (
        weaker_words({"A": 34, "B": 34, "C": 34}, 2, {"A": 7, "B": 17})
        == "14 to 34 GPUs are enough for A; 34 GPUs or fewer are enough for B or C."
    )


def test_a_weaker_goal_that_takes_far_fewer_gpus_is_told_with_about_how_many(server: Profile) -> None:
    """Plans for the goal itself begin where it may be kept: 17 GPUs were said to be enough for a limit that 11 keep."""
    fleet = Workload([Adapter(f"a{k}", 8, 1.0) for k in range(40)])
    job, wide = Frontier(fleet.held_to("mean_itl_ms=15"), server), "--slo mean_itl_ms=37.5"
    found = by_splits(job, {wide: 9, "--slo mean_itl_ms=100": 2, AFTER_START: 9})
    assert [*found] == [wide]
    assert 1 < found[wide] <= packer.recommend(fleet, server, slo="mean_itl_ms=37.5").n_gpus < 9
    assert job.workload.slo.limits.mean_itl_ms == 15.0


def test_a_start_limits_a_server_and_is_told_beside_the_plan(quiet: Workload, qwen: Profile) -> None:
    """Requests that wait too long only after a start are no matter of slots; the advice, a request to each adapter
    beforehand, avoids it: without first uses nothing waits so long."""
    swift = replace(qwen, frontend=replace(qwen.frontend, first_use_ms=0.0))
    for profile, late in ((qwen, True), (swift, False), (with_engine(qwen, warm_start=True), False)):
        item = Bin(tuple(range(len(quiet))), profile.settings(128, 16), profile)
        kept = KeptHours(quiet, quiet, 0, Hours())
        hour = packer.simulate(quiet, profile, max_loras=128, max_lora_rank=16)
        assert bool(hour.late.size) == late
        assert (limit_of(hour).name == "start") == late
        told = start_words(kept, [item], 0)
        assert len(told) == late
        assert not late or re.match(
            r"Requests wait up to \d+\.\d s in the first \d0 s after a start: a request", told[0]
        )


@pytest.mark.parametrize(
    ("sent_s", "words"),
    [
        ((3.0, 19.9), "in the first 20 s after a start"),
        ((400.0, 401.0), "in minute 7"),
        ((299.0, 1100.0), "in minutes 5–19"),
        ((20.0, 3000.0), ""),
    ],
)
def test_delays_are_told_with_their_minutes(sent_s: tuple[float, ...], words: str) -> None:
    """Delays at the start, close together, or all over the hour."""
    fleet = Workload([Adapter("a", 8, 1.0)])
    assert _when(np.array(sent_s, dtype=np.float32), fleet).strip() == words


def test_bursts_soon_after_a_start_are_bursts() -> None:
    """Where rates change, what waits in the first minutes does not wait because of the start."""
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("bursty", own=Bursts(2.0, ((60.0, 1.0),))))
    assert _when(np.array([3.0, 100.0], dtype=np.float32), fleet) == " in minutes 1–2"


def test_a_shorter_context_is_named_where_contexts_take_the_slots() -> None:
    """Servers that hold as many slots as the KV cache of a whole context leaves could hold more with a shorter one; not
    so if they hold fewer, if requests are that long, or if the profile measured what a server needs."""
    profile = estimate_profile("google/gemma-3-27b-it", "h100-80gb", max_model_len=30_000)
    fleet = Workload([Adapter(f"a{i}", 32, 0.01) for i in range(4)])
    most = largest_max_loras(profile, 32)
    settings = profile.settings(most, 32)
    full = [Bin((0, 1), settings, profile), Bin((2, 3), settings, profile)]
    said = context_words(fleet, profile, full)
    assert said.startswith(f"max_model_len 30000 leaves room for {most} slots of rank 32: --max-model-len 5120")
    shorter = with_engine(profile, max_model_len=5120)
    assert said.endswith(f"leaves {largest_max_loras(shorter, 32)}, and may take fewer GPUs.")
    assert context_words(fleet, shorter, [Bin((0, 1), shorter.settings(2, 32), shorter)]) == ""
    long = replace(fleet, input_tokens=Lengths.constant(20_000))
    assert context_words(long, profile, full) == ""
    growing = Workload([replace(each, sessions=packer.Sessions(turns=4)) for each in fleet.adapters])
    assert context_words(growing, profile, full) == "", "requests hold the turns before them, too"
    measured = replace(profile, memory=replace(profile.memory, min_kv_tokens=5000))
    assert context_words(fleet, measured, full) == ""


class _BreaksInBusyHours(KeptHours):
    """Of the hours that are the busiest of several, the second breaks the goal of two of the three adapters of the
    first server; no other server is asked for."""

    def broken_in(self, bins: Sequence[Bin], hours: Sequence[Hour]) -> list[Hour]:
        assert [item.adapters for item in bins] == [(0, 1, 2)]
        return list(hours[1:2])

    def adapters(self, bins: Sequence[Bin], hour: Hour) -> Any:
        assert self.broken_in(bins, [hour, hour])
        return SimpleNamespace(slo_used=np.array([2.0, 0.5, np.inf, np.nan]))


def test_a_plan_says_how_many_busy_hours_break_it(server: Profile) -> None:
    """Where arrivals vary, fresh hours may keep a goal that a busy one breaks: the plan says in how many of the hours
    drawn, and for how many adapters, of servers with little room. Elsewhere, and once the time is over, no hour is
    drawn."""
    fleet = Workload([Adapter(f"a{k}", 16, 0.3) for k in range(4)], arrivals=Arrivals("unpredictable"))
    bins = (Bin((0, 1, 2), server.settings(3, 16), server), Bin((3,), server.settings(1, 16), server))
    rooms = tuple(Room(factor) for factor in (LEVELS[1], LEVELS[2]))
    plan = SimpleNamespace(bins=bins, rooms=rooms, workload=fleet, n_gpus=2)
    kept = _BreaksInBusyHours(fleet, fleet, 0, Hours())
    said = "Busy hours may break the goal: of the busiest 6 of 24 hours 1 breaks it, for 2 of 4 adapters."
    assert busy_words(kept, plan, 2) == (said,)
    assert busy_words(kept, plan) == (f"{said} --min-gpus 3 gives more room.",)
    assert busy_words(_BreaksInBusyHours(fleet, fleet, 0, Hours(stop=lambda: True)), plan) == ()
    plan.rooms = rooms[1:] * 2
    assert busy_words(kept, plan) == ()
    even = fleet.with_arrivals(Arrivals())
    plan.rooms = ()
    assert busy_words(_BreaksInBusyHours(even, even, 0, Hours()), plan) == ()


def test_fewer_gpus_that_break_another_limit_say_by_how_much(server: Profile) -> None:
    """Where neither waits, ITL nor a queue is the cause, the share of its limits that a server uses is the reason."""
    fleet = Workload([Adapter(f"a{k}", 8, 0.12) for k in range(20)])
    bins = [Bin(tuple(range(20)), server.settings(20, 8), server)]
    mean_ms = float(Hours().all(bins, fleet)[0].adapters.mean_itl_ms.max())
    fleet = fleet.held_to(f"p99_itl_ms={1.02 * mean_ms},adapter_share=0.9")
    kept = KeptHours(fleet, fleet, 0, Hours())
    point = SimpleNamespace(broken_later=False, plan=SimpleNamespace(bins=bins))
    said = shortfall.late_words(kept, cast("Any", point))
    (used,) = re.findall(r"^: a server uses (\d+) % of its limits$", said)
    assert int(used) - 1 < 100.0 * kept.all(bins, kept.planned)[0].used <= int(used)
