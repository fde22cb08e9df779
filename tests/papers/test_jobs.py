"""The job engine: c jobs at once in order of arrival, and the limits that queueing theory has in closed form."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.cluster import Cluster, ServerKind
from packer.engine_spec import EngineSpec
from packer.errors import ValidationError
from packer.lengths import Lengths
from packer.papers.jobs.engine import Jobs
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.cluster.system import System
from packer.twin.run import Run
from packer.workload import Workload

MEAN_S = 0.5
STEPS = 2000  # mean iterations: service times are fine-grained
JOBS = System("jobs", "", "", "round-robin", engine="job", cache="unlimited")


def _profile(load_ms: float = 0.0, cells: int = 10_000) -> Profile:
    return Profile(
        "tests/jobs",
        ModelSpec("images", 0.0, 1.0, 1.0),
        GpuSpec("images", 1e9),
        EngineSpec("job", "0", max_model_len=10**6, max_num_batched_tokens=10**6, max_num_seqs=1),
        MemorySpec(float(cells), 0.0, 0.0, 1, "unified"),
        LatencySpec("linear", {"per_decode_ms": MEAN_S * 1e3 / STEPS}, 0),
        LoadingSpec(load_ms),
        calibrated=True,
    )


def _run(parallel: int, load: float, cv: float, noise: float = 0.0) -> Run:
    rate = load * parallel / MEAN_S
    lengths = Lengths.gamma(STEPS, cv) if cv else Lengths.constant(STEPS)
    fleet = Workload([Adapter("a", 8, rate)], Lengths.constant(1), lengths, length_correlation=0.0)
    kind = ServerKind("gpu", _profile(), 1, 8, Jobs(parallel, noise))
    system = System("jobs", "", "", "round-robin", cache="unlimited")
    return simulate_cluster(fleet, Cluster((kind,), ("gpu",)), system, duration_s=150_000 / rate, seed=3)


def _waits(run: Run, parallel: int) -> np.ndarray:
    """Time in the queue of each completed job, by first come, first served over its service time."""
    done = run.raw.finished
    service = run.raw.requests.output_tokens[done] * (MEAN_S / STEPS)
    found: np.ndarray = run.raw.finish_s[done] - run.raw.requests.time_s[done] - service
    return found


@pytest.mark.parametrize(("parallel", "cv"), [(1, 1.0), (4, 1.0), (1, 0.0), (1, 0.5)])
def test_waits_are_those_of_theory(parallel: int, cv: float) -> None:
    """M/M/1, M/M/c by Erlang C, and M/G/1 by Pollaczek and Khinchine, within four standard errors."""
    load = 0.7
    run = _run(parallel, load, cv)
    offered = parallel * load
    busy = offered**parallel / math.factorial(parallel) / (1 - load)
    chance = busy / (sum(offered**k / math.factorial(k) for k in range(parallel)) + busy)
    expected = chance * MEAN_S / (parallel * (1 - load)) * (1 + cv**2) / 2
    waits = _waits(run, parallel)
    assert waits.min() > -1e-6
    means = np.array([part.mean() for part in np.array_split(waits, 40)])
    error = means.std(ddof=1) / math.sqrt(40)
    assert error < 0.1 * expected
    assert abs(waits.mean() - expected) < 4 * error
    assert run.busy_share == pytest.approx(load, rel=0.02)
    assert run.mean_running == pytest.approx(load * parallel, rel=0.02)
    rate = len(waits) / run.duration_s
    assert run.mean_waiting == pytest.approx(rate * waits.mean(), rel=0.01)  # Little's law


def test_noise_has_its_variation() -> None:
    """`cv` spreads service times log-normally around those of the law."""
    run = _run(64, 0.02, 0.0, noise=0.4)
    done = run.raw.finished
    service = run.raw.finish_s[done] - run.raw.requests.time_s[done]
    assert service.mean() == pytest.approx(MEAN_S, rel=0.01)
    assert service.std() / service.mean() == pytest.approx(0.4, rel=0.05)


def _lru(adapters: list[int], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    loads = 0
    for a in adapters:
        loads += a not in cache
        cache[a] = None
        cache.move_to_end(a)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return loads


def _lfu(adapters: list[int], capacity: int) -> int:
    """The job that starts is in the cache; the least used of the others leaves, then the least recently used."""
    cache: OrderedDict[int, None] = OrderedDict()
    uses, loads = dict.fromkeys(adapters, 0), 0
    for a in adapters:
        if a not in cache:
            loads += 1
            if len(cache) == capacity:
                del cache[min(cache, key=lambda b: uses[b])]
            cache[a] = None
        uses[a] += 1
        cache.move_to_end(a)
    return loads


def test_the_spread_of_service_times_is_that_of_any_engine_and_a_number() -> None:
    """Systems are compared on the same noise: that of the engine with most of it; one that is no number is refused."""
    fleet = Workload([Adapter("a", 8, 0.2)], Lengths.constant(1), Lengths.constant(STEPS))
    system = System("jobs", "", "", "round-robin", cache="unlimited")
    odd = Jobs(1)
    object.__setattr__(odd, "cv", math.nan)  # as a plug-in may have it, whose class checks nothing
    for second, spread in ((Jobs(1, 1.0), True), (Jobs(1), False)):
        kinds = tuple(ServerKind(f"gpu-{k}", _profile(), 1, 8, each) for k, each in enumerate((Jobs(1), second)))
        run = simulate_cluster(fleet, Cluster(kinds, ("gpu-0", "gpu-1")), system, duration_s=500.0)
        assert (float(np.nanstd(run.servers[0].raw.finish_s - run.servers[0].raw.requests.time_s)) > 0.1) == spread
    with pytest.raises(ValidationError, match="cv of the engine"):
        simulate_cluster(fleet, Cluster((ServerKind("gpu", _profile(), 1, 8, odd),), ("gpu",)), system)


@pytest.mark.parametrize("rule", ["lru", "lfu", "drop", "none"])
@pytest.mark.parametrize("capacity", [3, 10])
def test_cache_is_what_its_rule_says(rule: str, capacity: int) -> None:
    """Loads of jobs that run one at a time, at a load that leaves none waiting, against each rule's definition."""
    fleet = Workload([Adapter(f"a{i}", 8, 1.0 / (i + 1)) for i in range(20)], Lengths.constant(1), Lengths.constant(4))
    system = System("jobs", "", "", "round-robin", engine="job", cache=rule, memory="unified")
    cluster = Cluster.of(_profile(5.0, cells=8 * capacity), 1, max_loras=1, max_lora_rank=8)
    run = simulate_cluster(fleet, cluster, system, duration_s=1000.0)
    assert run.state is not None
    adapters = run.state.adapter.tolist()
    expected = {
        "lru": _lru(adapters, capacity),
        "lfu": _lfu(adapters, capacity),
        "drop": len(adapters),
        "none": len(adapters),
    }
    assert run.max_running == 1
    assert run.adapter_loads == pytest.approx(expected[rule], abs=0 if rule in ("lru", "lfu") else 12)
    assert run.hit_rate == pytest.approx(1 - run.adapter_loads / run.sent, abs=0.01)


def _ends(jobs: list[tuple[float, int, float]], parallel: int, capacity: int, load_s: float) -> list[float]:
    """When each job ends, first come, first served, with an LRU cache of adapters; jobs (arrival, adapter, service)."""
    ends: list[float] = []
    running: list[tuple[float, int]] = []  # end, adapter
    idle: list[int] = []
    for arrival, adapter, service in jobs:
        now = max(arrival, min(running)[0] if len(running) == parallel else 0.0)
        for end, a in sorted(running):
            if end <= now:
                running.remove((end, a))
                if a not in [b for _, b in running]:
                    idle.append(a)
        used = {a for _, a in running}
        here = adapter in used or adapter in idle
        if adapter in idle:
            idle.remove(adapter)
        elif not here and len(used) + len(idle) == capacity:
            idle.pop(0)
        running.append((now + (0.0 if here else load_s) + service, adapter))
        ends.append(running[-1][0])
    return ends


def test_servers_behind_a_router_are_the_oracle() -> None:
    """Jobs at each of several servers, stopped whenever a request is routed, end when the oracle says."""
    fleet = Workload([Adapter(f"a{i}", 8, 3.0) for i in range(6)], Lengths.constant(1), Lengths.gamma(STEPS, 1.0))
    kind = ServerKind("gpu", _profile(200.0, cells=24), 1, 8, Jobs(3, 0.3))
    system = System("jobs", "", "", "most-idle", cache="lru", memory="unified")
    run = simulate_cluster(fleet, Cluster((kind,), ("gpu",) * 4), system, duration_s=60.0)
    assert run.state is not None
    for s in range(4):
        own = np.flatnonzero(run.state.server == s)
        noise = run.state.requests["last_s"][own]
        service = run.raw.requests.output_tokens[own] * (MEAN_S / STEPS) * noise
        jobs = list(
            zip(run.raw.requests.time_s[own].tolist(), run.state.adapter[own].tolist(), service.tolist(), strict=True)
        )
        ends = np.array(_ends(jobs, 3, 3, 0.2))
        done = ends <= run.duration_s
        assert done.sum() > 100
        assert (np.isnan(run.raw.finish_s[own]) == ~done).all()
        np.testing.assert_allclose(run.raw.finish_s[own][done], ends[done], rtol=1e-12)
    assert run.hit_rate < 0.9
