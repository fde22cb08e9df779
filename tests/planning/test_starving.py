"""Servers that certainly starve are simulated with a part of their requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.planning.starving import PlannedHours, servers_by_load
from packer.profile import Profile
from packer.sessions import Sessions
from packer.twin.hours import Hours
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload


@pytest.mark.parametrize("kind", ["poisson", "unpredictable"])
def test_a_server_that_certainly_starves_is_simulated_with_fewer_requests(
    kind: str, toy_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of far more requests than a server can serve a part is simulated; its figures are those of all requests."""
    fleet, seen = Workload([Adapter("hot", 8, 1e6)], arrivals=Arrivals(kind)), list[Workload]()

    def counted(own: Workload, *given: Any, **more: Any) -> Run:
        seen.append(own)
        return simulate(own, *given, **more)

    monkeypatch.setattr("packer.planning.starving.simulate", counted)
    item = Bin((0,), toy_profile.settings(1, 8), toy_profile)
    (hour,) = PlannedHours().all([item], fleet)
    assert [own.rate < 1e4 for own in seen] == [True]
    assert (hour.used, hour.holds, hour.figures.starved) == (math.inf, (False, False, False), True)
    assert 0.0 < hour.figures.served_share < 0.01
    assert hour.adapters.slo_attainment[0] < 0.01
    calm = fleet.scaled(5e-7)
    (plain,) = Hours().all([item], calm)
    assert PlannedHours().all([item], calm)[0].figures == plain.figures
    if kind == "poisson":  # the rates of the other are drawn
        assert hour.figures.offered_tok_s == pytest.approx(fleet.offered_tok_s)


def test_all_tokens_of_sessions_count_without_a_prefix_cache() -> None:
    """Without a cache, a server computes all earlier turns again: the load takes more servers."""
    plain = load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet = Workload([Adapter("a", 8, 300.0)], sessions=Sessions(10.0))
    cached = replace(plain, engine=replace(plain.engine, version="0.30", prefix_caching=True))
    assert servers_by_load(fleet, plain) > 2 * servers_by_load(fleet, cached)
