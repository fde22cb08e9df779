"""Classes of adapters on servers of their own, where that takes fewer servers than all classes on each."""

from __future__ import annotations

from dataclasses import replace

from packer import Adapter, Goal, Workload
from packer.planning.explore import Frontier
from packer.profile import Profile


def test_a_class_with_a_tight_limit_has_its_own_server(server: Profile) -> None:
    """Only this server is lightly loaded: on two servers, no plan that mixes the classes keeps the limits."""
    own = [Adapter(f"fast {k}", 16, rate, slo_class="fast") for k, rate in enumerate((3.0, 2.5, 2.5))]
    others = [Adapter(f"slow {k}", 16, 2.5) for k in range(8)]
    fleet = Workload(own + others).held_to(Goal().parsed(["fast:mean_itl_ms=18"]))
    point = Frontier(fleet, server).at(2)
    assert point.holds
    assert {(0, 1, 2)} < {tuple(sorted(item.adapters)) for item in point.plan.bins}


def test_adapters_that_wide_limits_leave_over_go_beside_tight_ones(server: Profile) -> None:
    """One server holds most slow adapters, and the fast one's has room for the rest: classes wholly on servers of
    their own, or wholly mixed, took three servers."""
    slow = [Adapter(f"slow {k}", 16, 2.0) for k in range(18)]
    fleet = Workload([Adapter("fast", 16, 1.0, slo_class="fast"), *slow])
    point = Frontier(fleet.held_to(Goal().parsed(["fast:mean_itl_ms=22"])), server).at(2)
    assert point.holds
    beside, full = sorted((item.adapters for item in point.plan.bins), key=len)
    assert 0 in beside
    assert len(beside) > 1
    assert 0 not in full


def test_no_further_class_is_planned_once_the_time_is_over(server: Profile) -> None:
    """Each class would still take a plan of its own: 1,500 adapters in four took 6 s more than a limit of 4 s."""
    made: list[Frontier] = []

    def stop() -> bool:
        return bool(made and made[0].apart[1]._jobs)  # type: ignore[attr-defined]

    fleet = Workload([Adapter(f"a{k}", 16, 1.0, slo_class="xyz"[k % 3]) for k in range(6)])
    limits = ["x:mean_itl_ms=20", "y:mean_itl_ms=30", "z:mean_itl_ms=40"]
    made.append(Frontier(fleet.held_to(Goal().parsed(limits)), server, stop=stop))
    assert list(made[0].apart[1].on(3)) == []
    assert len(made[0].apart[1]._jobs) == 1  # type: ignore[attr-defined]
    half = replace(made[0], time_limit_s=100.0, stop=lambda: False)
    half.started -= 60.0
    assert list(half.apart[1].on(3)) == []
    assert half.apart[1]._jobs == {}, "the second half of the time is for plans with all classes on each server"  # type: ignore[attr-defined]


def test_each_class_survives_the_loss_of_one_of_its_own_servers(server: Profile) -> None:
    """With a spare server, classes are apart, too: where they share servers, those that take over from a lost one break
    the tight limit on as many."""
    own = [Adapter(f"fast {k}", 16, 2.0, slo_class="fast") for k in range(2)]
    fleet = Workload([*own, *(Adapter(f"slow {k}", 16, 2.5) for k in range(2))])
    job = Frontier(fleet.held_to(Goal().parsed(["fast:mean_itl_ms=16"])), server, spare=1)
    bins = next(job.apart[1].on(4))
    assert job.kept.holds(bins, 1)
