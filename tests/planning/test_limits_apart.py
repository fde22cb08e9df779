"""Classes of adapters on servers of their own, where that takes fewer servers than all classes on each."""

from __future__ import annotations

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
