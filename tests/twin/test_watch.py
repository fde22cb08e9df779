"""A run that is ended early would have broken its limits: what the watch ends, the whole hour breaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer import Adapter, Workload, registry
from packer.arrival import Arrivals, Bursts
from packer.bin import Bin
from packer.profile import Profile
from packer.twin.engine.state import ServerState
from packer.twin.hours import Hours, ServerHour
from packer.twin.simulate import simulate
from packer.twin.watch import BrokenError, Watch

N = 16


def server_of(rng: np.random.Generator, server: Profile) -> tuple[Workload, Bin]:
    """A fleet of 3 to 80 adapters from quiet to overloaded, with classes, shares or bursts, and a server of it."""
    n = int(rng.integers(3, 80))
    rates = rng.lognormal(0.0, 1.0, n)
    rates *= float(rng.uniform(1.0, 14.0)) / rates.sum()
    classes = [str(rng.choice(["strict", ""])) or None for _ in range(n)]
    fleet = Workload(
        [Adapter(f"a{k}", int(rng.choice((8, 32))), float(rate), slo_class=classes[k]) for k, rate in enumerate(rates)],
        arrivals=Arrivals("bursty", common=Bursts(1.0, ((300.0, 1.0),))) if rng.random() < 0.25 else Arrivals(),
    )
    share = float(rng.choice((1.0, 1.0, 0.9)))
    limit_ms = float(rng.choice((150, 500, 2000)))
    fleet = fleet.held_to(f"p95_ttft_ms={limit_ms},adapter_share={share};strict:p95_ttft_ms={0.7 * limit_ms}")
    slots = min(n, int(rng.choice((2, 8, 24))))
    return fleet, Bin(tuple(range(n)), server.settings(slots, 32), server)


GOALS = ("p95_ttft_ms={0}", "median_ttft_ms={1}", "p99_ttft_ms={0}", "mean_ttft_ms={1}", "mean_tpot_ms={2}",
    "p90_tpot_ms={2},p95_ttft_ms=9000", "p99_e2e_ms={3}", "mean_e2e_ms={3}")  # fmt: skip
"""Goals with places for limits of statistics of TTFT, of typical TTFT, of TPOT and of whole answers, ms."""


@pytest.mark.parametrize("seed", range(N))
@pytest.mark.parametrize("usual", [True, False])
def test_what_the_watch_ends_the_whole_hour_breaks(server: Profile, seed: int, usual: bool) -> None:
    """An ended run has used more than the watched share of its limits in the whole hour, and so have the adapters that
    it names; others are as without it."""
    fleet, item = server_of(rng := np.random.default_rng(seed), server)
    if not usual:
        limits = [float(rng.uniform(*each)) for each in ((150, 2000), (40, 300), (15, 60), (2000, 9000))]
        fleet = fleet.held_to(GOALS[seed % len(GOALS)].format(*limits) + f",adapter_share={fleet.slo.adapter_share}")
    options = {"max_loras": item.max_loras, "max_lora_rank": 32, "seed": seed}
    run = simulate(fleet, server, **options)
    whole = run.slo_used
    for most in (0.5 * min(whole, 50.0), 1.0, 0.999 * min(whole, 50.0), 1.001 * min(whole, 1e6), 8.0):
        hours = Hours(seed)
        (found,) = hours.judged([(item, fleet, seed)], [most])
        if isinstance(found, BrokenError):
            assert whole > most
            assert 0.0 < found.part <= 1.0
            assert (run.adapter_slo_used[list(found.late)] > most).all()
            assert len(found.late) > round((1.0 - fleet.slo.adapter_share) * len(fleet), 9) - 1.0
        else:
            assert found.used == whole


@pytest.mark.parametrize("goal", GOALS)
def test_every_statistic_of_an_adapter_ends_a_run_early(server: Profile, goal: str) -> None:
    """A run that uses five times its limits ends before the hour does, by whatever statistic, also with an adapter that
    may break them."""
    heavy = Workload([Adapter(f"a{k}", 16, 0.3) for k in range(30)])
    usual = simulate(heavy, server, max_loras=30)
    assert usual.slo_used < 1.0
    names = ("p95_ttft_ms", "mean_ttft_ms", "mean_tpot_ms", "mean_e2e_ms")
    limits = [usual.figure(name) / 5.0 for name in names]
    fleet = heavy.held_to(goal.format(*limits) + ",adapter_share=0.95")
    item = Bin(tuple(range(30)), server.settings(30, 16), server)
    (found,) = Hours().judged([(item, fleet, 0)], [1.0])
    assert isinstance(found, BrokenError)
    assert found.part < 0.9
    assert len(found.late) > 1


def test_overload_ends_a_run_early(server: Profile) -> None:
    """A server with three times its load is ended within a fifth of the hour; a calm one goes to its end."""
    heavy = Workload([Adapter(f"a{k}", 16, 1.5) for k in range(30)])
    item = Bin(tuple(range(30)), server.settings(30, 16), server)
    hours = Hours()
    busy, calm = hours.judged([(item, heavy, 0), (item, heavy.scaled(0.05), 0)], [8.0, 8.0])
    assert isinstance(busy, BrokenError)
    assert busy.part < 0.2
    assert isinstance(calm, ServerHour)
    (again,) = hours.judged([(item, heavy, 0)], [1.0])
    assert again is busy  # what breaks 8 times the limits breaks them
    (whole,) = hours.all([item], heavy)
    assert not all(whole.holds)
    (known,) = hours.judged([(item, heavy, 0)], [8.0])
    assert known is whole


def test_an_ended_run_blames_no_plug_in(server: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run that breaks its limits is a result, not an error that the packages of plug-ins are read for."""
    heavy = Workload([Adapter(f"a{k}", 8, 3.0) for k in range(30)])
    monkeypatch.setattr(registry, "plugin_behind", lambda error: pytest.fail(str(error)))
    with pytest.raises(BrokenError):
        simulate(heavy, server, max_loras=30, watch=Watch(1.0))


@pytest.mark.parametrize("shared_tokens", [0, 400])
def test_overload_ends_a_run_with_prefix_caching_early(server: Profile, shared_tokens: int) -> None:
    """A server that preempts requests and finds their blocks again is ended as early as one without prefix caching, but
    not for what it does in a run without blocks, which is repeated."""
    looks: list[float] = []

    class Looks(Watch):
        """A watch that ends nothing."""

        def __call__(self, state: ServerState, workload: Workload, duration_s: float, part: float) -> None:
            """Note the parts after which requests had been preempted."""
            looks.extend([part] if state.server["preemptions"] else [])

    cached = replace(server, engine=replace(server.engine, prefix_caching=True, gpu_memory_utilization=0.4))
    heavy = Workload([Adapter(f"a{k}", 16, 3.0, shared_prefix_tokens=shared_tokens) for k in range(30)])
    item = Bin(tuple(range(30)), cached.settings(30, 16), cached)
    (busy,) = Hours().judged([(item, heavy, 0)], [8.0])
    assert isinstance(busy, BrokenError)
    assert busy.part < 0.2
    whole = simulate(heavy, cached, max_loras=30, watch=Looks(8.0))
    assert whole.slo_used > 8.0
    assert whole.preemptions
    assert looks == sorted({*looks})
