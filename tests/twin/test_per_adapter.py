"""What each adapter got in a simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cluster import Cluster
from packer.errors import UnknownNameError
from packer.goal import OF_MANY, Goal, Limits, Slo, level
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import LatencySpec, Profile
from packer.speculation import SpeculationSpec
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.per_adapter import (
    FEW_CHANCE,
    FEW_MAY_REACH,
    FEW_REQUESTS,
    MEAN_FROM,
    _more_than,
    few_used,
    judged_ms,
    quiet_adapters,
)
from packer.twin.per_server import quantiles
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

MakeProfile = Callable[..., Profile]


def test_an_adapter_is_found_by_name_or_number(busy: Run) -> None:
    """The view of one adapter is its row of the frame; an adapter that is not there is refused by name."""
    assert busy.adapter("a3") == busy.adapter(3) == busy.per_adapter.row(3, named=True)
    for unknown in ("a9", 6, -1):
        with pytest.raises(UnknownNameError, match=str(unknown)):
            busy.adapter(unknown)


def test_adapters_add_up_to_the_server(busy: Run) -> None:
    """Counts and throughputs per adapter sum up to the server's, and their means weigh up to its mean."""
    frame = busy.per_adapter
    assert frame["adapter"].to_list() == [f"a{i}" for i in range(6)]
    assert frame["sent"].sum() == busy.sent
    assert frame["completed"].sum() == busy.completed
    assert frame["total_token_throughput"].sum() == pytest.approx(busy.total_token_throughput)
    weighted = (frame["mean_ttft_ms"] * frame["completed"]).sum() / busy.completed
    assert weighted == pytest.approx(busy.mean_ttft_ms)


def test_adapter_without_requests_has_no_latency(make_profile: MakeProfile) -> None:
    """An adapter for which nothing completed has nulls, not zeros."""
    fleet = Workload([Adapter("busy", 8, 2.0), Adapter("silent", 8, 1e-9)])
    frame = simulate(fleet, make_profile(), max_loras=2, duration_s=60.0).per_adapter
    assert frame["mean_ttft_ms"].is_null().to_list() == [False, True]
    assert frame["completed"][1] == 0


def test_refused_requests_belong_to_adapters(make_profile: MakeProfile) -> None:
    """Refused Poisson requests keep their adapters and lengths: the client sends what it sends without a ceiling."""
    fleet = Workload([Adapter("often", 8, 90.0), Adapter("seldom", 8, 10.0)])
    sim = simulate(fleet, make_profile(), max_loras=2, duration_s=60.0, max_outstanding=20)
    every = simulate(fleet, make_profile(), max_loras=2, duration_s=60.0)
    assert sim.refused > 3000
    assert (sim.sent, sim.sent_tokens) == (every.sent, every.sent_tokens)
    assert sim.per_adapter["sent"].to_list() == every.per_adapter["sent"].to_list()


def test_figures_of_each_adapter_are_those_of_its_requests(busy: Run) -> None:
    """Mean and 95th percentile of TTFT and mean ITL are those of the adapter's completed requests alone."""
    raw = busy.raw
    for a in range(6):
        mine = raw.finished & (raw.requests.adapter == a)
        ttft_ms = (raw.first_s[mine] - raw.requests.time_s[mine]) * 1e3
        gaps = (raw.requests.output_tokens[mine] - 1).sum()
        span_ms = (raw.finish_s[mine] - raw.first_s[mine]).sum() * 1e3
        assert busy.adapter_mean_ttft_ms[a] == pytest.approx(ttft_ms.mean())
        assert busy.adapter_p95_ttft_ms[a] == pytest.approx(np.quantile(ttft_ms, 0.95))
        assert busy.adapter_mean_itl_ms[a] == pytest.approx(span_ms / gaps)


def _one_slot(make_profile: MakeProfile, *requests: tuple[float, int, int]) -> Run:
    """(time, adapter, output tokens) of requests of 10 tokens, 10 ms a step, one adapter at a time, for 2 s."""
    time_s, owner, output = (np.array(column) for column in zip(*requests, strict=True))
    trace = RequestTrace(time_s.astype(float), owner, np.full(len(owner), 10), output)
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(3)], arrivals=Arrivals("trace", trace=trace))
    return simulate(fleet, make_profile(), max_loras=1, duration_s=2.0, max_outstanding=3)


def _attained(sim: Run, slo: Slo) -> list[float]:
    """Share of each adapter's requests within limits, of a run that has taken place."""
    return replace(sim, workload=replace(sim.workload, slo=slo)).adapter_slo_attainment.tolist()


def test_attainment_and_goodput_by_hand(make_profile: MakeProfile) -> None:
    """Late first tokens, refused and never started requests fail, those that the end cuts off do not count."""
    # a0 gets its first token after 10 ms and ends at 0.5 s; a1 waits for its slot until then; a2 never gets it
    sim = _one_slot(make_profile, (0.0, 0, 50), (0.1, 1, 400), (0.2, 2, 5), (0.3, 2, 5))
    assert sim.refused == 1
    assert _attained(sim, Slo.of(500.0)) == pytest.approx([1.0, math.nan, 0.0], nan_ok=True)
    assert _attained(sim, Slo.of(300.0)) == [1.0, 0.0, 0.0]
    assert _attained(sim, Slo.of(5.0)) == [0.0, 0.0, 0.0]
    assert _attained(sim, Slo.of(2000.0, 9.0))[0] == 0.0
    assert _attained(sim, Slo.of(2000.0, 11.0))[0] == 1.0
    tight = replace(sim, workload=replace(sim.workload, slo=Slo.of(300.0)))
    assert tight.slo_attainment == pytest.approx(1 / 4)
    servers = Cluster.of(sim.profile, 1, max_loras=1)
    routed = simulate_cluster(tight.workload, servers, duration_s=2.0, max_outstanding=3)
    for each in (tight, routed):  # a refused request waits for the whole run
        assert judged_ms(each, "p95_ttft_ms")[2] == 2000.0
    requests = sim.workload.arrivals.trace
    assert requests is not None
    assert tight.goodput_tok_s == (requests.input_tokens[0] + 50) / sim.duration_s


def test_late_requests_are_those_beyond_their_own_limit(busy: Run) -> None:
    """Each completed request is compared with the limit of its adapter, by its class."""
    limits = (Limits(float(np.quantile(busy.ttft_ms, 0.2))), Limits(float(np.quantile(busy.ttft_ms, 0.8))))
    adapters = tuple(
        replace(each, slo_class="chat" if k % 2 else None) for k, each in enumerate(busy.workload.adapters)
    )
    slo = Slo(limits[0], classes=(("chat", limits[1]),))
    sim = replace(busy, workload=replace(busy.workload, adapters=adapters, slo=slo))
    found = []
    for i, sent_s in enumerate(busy.raw.requests.time_s):
        if busy.raw.finished[i]:
            ttft_ms = (busy.raw.first_s[i] - sent_s) * 1e3
            if ttft_ms > limits[busy.raw.requests.adapter[i] % 2].p95_ttft_ms:
                found.append((sent_s, ttft_ms))
    assert np.allclose(sim.late.T, found)
    assert 0 < len(found) < busy.completed


def test_a_class_has_its_own_limits(make_profile: MakeProfile) -> None:
    """Requests are compared with the limits of their adapter's class."""
    sim = _one_slot(make_profile, (0.0, 0, 50), (0.1, 1, 5), (0.8, 0, 5))
    fleet = sim.workload
    patient = replace(fleet.adapters[1], slo_class="batch")
    classed = replace(fleet, adapters=(fleet.adapters[0], patient, *fleet.adapters[2:]))
    slo = Slo(Limits(300.0), {"batch": Limits(5000.0)})  # type: ignore[arg-type]
    assert _attained(sim, slo)[:2] == [1.0, 0.0]
    assert _attained(replace(sim, workload=classed), slo)[:2] == [1.0, 1.0]


def test_loads_per_request_by_hand(make_profile: MakeProfile) -> None:
    """Two adapters in one slot by turns are loaded once for each of their requests."""
    sim = _one_slot(make_profile, (0.0, 0, 5), (0.5, 1, 5), (1.0, 0, 5), (1.2, 0, 5))
    assert (sim.adapter_loads, sim.loads_per_request) == (3, 0.75)


def test_chance_of_adapters_with_few_requests_is_that_of_draws(make_profile: MakeProfile) -> None:
    """At the use that is found, requests drawn anew from those of the server put about `FEW_CHANCE` adapters beyond."""
    rng = np.random.default_rng(5)
    time_s = np.sort(rng.uniform(0.0, 900.0, 2_000))
    owner, ones = rng.integers(0, 150, 2_000), np.ones(2_000, dtype=np.int64)
    trace = RequestTrace(time_s, owner, 10 * ones, np.where(rng.random(2_000) < 0.02, 900, 20))
    fleet = Workload([Adapter(f"a{i}", 8, 1.0) for i in range(150)], arrivals=Arrivals("trace", trace=trace))
    run = simulate(fleet, make_profile(), max_loras=1, duration_s=900.0)
    assert few_used(replace(run, workload=replace(fleet, slo=Slo.of(run.ttft_ms.max())))) == 0.0
    for limit_ms in (0.02 * run.ttft_ms.max(), 0.2 * run.ttft_ms.max()):
        own = replace(run, workload=replace(fleet, slo=Slo.of(limit_ms)))
        level_ms = few_used(own) * FEW_MAY_REACH * limit_ms
        beyond = 0
        for count in np.bincount(owner, minlength=150).tolist():
            if MEAN_FROM <= count < FEW_REQUESTS:
                drawn = rng.choice(run.ttft_ms, (200, count))
                beyond += int((np.quantile(drawn, 0.95, axis=1) > level_ms).sum())
        assert 0.3 * FEW_CHANCE < beyond / 200 < 3.0 * FEW_CHANCE
        assert own.slo_used == max(few_used(own), own.adapter_slo_used.max())


def test_chances_of_few_requests_are_binomial() -> None:
    """The chance of more than k of n is SciPy's survival function, also for none, all and certain events."""
    rng = np.random.default_rng(0)
    n = rng.integers(5, FEW_REQUESTS, 500)
    k = np.minimum(rng.integers(-1, 9, 500), n - 1).astype(np.float64)
    p = np.concatenate([rng.random(250), 10.0 ** rng.uniform(-9.0, 0.0, 240), np.zeros(5), np.ones(5)])
    np.testing.assert_allclose(_more_than(k, n, p), binom.sf(k, n, p), rtol=1e-4, atol=1e-12)


def test_adapters_with_few_requests_are_counted_in_words() -> None:
    """People read how many adapters are held to the 95th percentile of their server; none is said for none."""
    fleet = Workload([Adapter("a", 8, 59 / 3600), Adapter("b", 8, 60 / 3600), Adapter("c", 8, 0.001)])
    assert quiet_adapters(fleet).startswith("2 of 3 adapters send fewer than 60 requests an hour: their p95")
    assert quiet_adapters(fleet.subset([0, 1])).startswith("1 adapter sends fewer than 60 requests an hour")
    assert quiet_adapters(fleet.subset([1])) == ""


def test_few_requests_may_not_reach_twice_the_limit(make_profile: MakeProfile) -> None:
    """One of ten requests that waits for a long answer in the only slot breaks the limit, though neither the mean of
    its adapter nor the percentile of the server does."""
    profile = make_profile(latency=LatencySpec("linear", {"base_ms": 20.0}))
    times = np.arange(110) * 3.0
    adapter = (np.arange(110) % 11 == 10).astype(np.int64)
    output = np.full(110, 5, dtype=np.int64)
    late = 54  # of the quiet adapter
    times[late], output[late - 1] = times[late - 1] + 0.01, 1000  # twenty seconds of steps
    times[late + 1 :] += 24.0
    trace = RequestTrace(times, adapter, np.full(110, 10, dtype=np.int64), output)
    fleet = Workload([Adapter("busy", 8, 0.3), Adapter("quiet", 8, 0.03)], arrivals=Arrivals("trace", trace=trace))
    limit_ms = 3000.0
    found = simulate(replace(fleet, slo=Slo(Limits(limit_ms, 1e6))), profile, max_loras=1)
    assert found.adapter_mean_ttft_ms[1] < limit_ms
    assert found.adapter_pooled_p95_ttft_ms[1] < limit_ms
    assert found.adapter_p95_ttft_ms[1] > 2 * limit_ms
    assert found.adapter_slo_used[1] == pytest.approx(found.adapter_p95_ttft_ms[1] / (2 * limit_ms))


@pytest.mark.parametrize("key", [key for key in OF_MANY if level(key) == "adapter"])
def test_limits_of_any_statistic_are_judged_by_the_definition(key: str, make_profile: MakeProfile) -> None:
    """The share of a limit that adapters with enough requests use, from the table of requests one by one."""
    fleet = Workload([Adapter("often", 8, 3.0), Adapter("seldom", 8, 0.2), Adapter("never", 8, 1e-8)])
    limit_ms = 250.0
    goal = Goal.only({key: limit_ms})
    sim = simulate(replace(fleet, slo=goal), make_profile(), max_loras=3, duration_s=200.0)
    statistic, _, what = key.removesuffix("_ms").partition("_")
    values = []
    for sent_s, first_s, finish_s, owner, tokens in zip(
        sim.raw.requests.time_s, sim.raw.first_s, sim.raw.finish_s, sim.raw.requests.adapter,
        sim.raw.requests.output_tokens, strict=True,
    ):  # fmt: skip
        if owner != 0 or math.isnan(finish_s) or (what in ("tpot", "itl") and tokens < 2):
            continue
        span_s = {"ttft": first_s - sent_s, "e2e": finish_s - sent_s}.get(what, finish_s - first_s)
        values.append((1e3 * span_s, tokens - 1))
    spans, gaps = np.array(values).T
    per_request = spans / gaps if what == "tpot" else spans
    share = {"median": 50, "p90": 90, "p95": 95, "p99": 99}.get(statistic)
    own = spans.sum() / gaps.sum() if what == "itl" else per_request.mean()
    if share is not None:
        own = np.percentile(per_request, share)
    assert sim.adapter_slo_used[0] == pytest.approx(own / limit_ms)
    assert sim.adapter_slo_used[2] == (0.0 if what != "itl" else pytest.approx(sim.mean_itl_ms / limit_ms))
    everyone = sim.figure(key)
    assert sim.adapter_slo_used[1] >= 0.5 * everyone / limit_ms  # few requests: not better than its server shows


def test_limits_of_servers_and_of_requests_count(make_profile: MakeProfile) -> None:
    """A server is beyond its goal if a figure of its own is, or more requests than may be are."""
    fleet = Workload([Adapter("a", 8, 3.0), Adapter("b", 8, 1.0)])
    sim = simulate(fleet, make_profile(), max_loras=2, duration_s=100.0)
    for key in ("server.p90_e2e_ms", "server.mean_ttft_ms", "p99_itl_ms", "server.p95_itl_ms"):
        figure = sim.figure(key.removeprefix("server."))
        for factor in (0.5, 2.0):
            judged = simulate(fleet, make_profile(), max_loras=2, duration_s=100.0, slo={key: figure * factor})
            assert judged.slo_used == pytest.approx(1.0 / factor)
    limit_ms = float(np.quantile(sim.ttft_ms, 0.97))
    few = simulate(fleet, make_profile(), max_loras=2, duration_s=100.0, slo={"ttft_ms": limit_ms})
    assert few.slo_attainment == pytest.approx(0.97, abs=0.01)
    assert few.slo_used == pytest.approx((1.0 - few.slo_attainment) / 0.01)
    given = {"ttft_ms": limit_ms, "request_share": 0.9}
    assert simulate(fleet, make_profile(), max_loras=2, duration_s=100.0, slo=given).slo_used < 1.0


def test_a_rare_adapter_gets_the_time_per_token_of_its_server() -> None:
    """With drafts a step brings several tokens: the mean ITL of adapters with few requests counts tokens, as that of
    others does, not steps, so that a rare adapter breaks no limit that all requests keep."""
    server = load_profile("h100-64gb/llama-3.1-8b-instruct")
    drafts = SpeculationSpec("eagle3", 5, 0.9, draft_pass_ms=0.3)
    server = replace(server, engine=replace(server.engine, version="0.32.0", speculation=drafts))
    lengths = Lengths.constant(200), Lengths.constant(100)
    adapters = [Adapter(f"a{k}", 8, 0.5, *lengths) for k in range(4)]
    goal = Goal.parse("mean_itl_ms=10")
    usual = Workload(adapters, slo=goal)
    rare = Workload([*adapters, Adapter("rare", 8, 0.001, *lengths)], slo=goal)
    found = [simulate(fleet, server, max_loras=5, duration_s=1800.0, seed=1) for fleet in (usual, rare)]
    assert all(1 <= run.completed_of[4] < 5 for run in found[1:])
    assert found[1].slo_used == pytest.approx(found[0].slo_used, rel=0.1)
    assert all(run.slo_used < 0.5 < 1.0 < run.mean_itl_ms / 10.0 for run in found)


def test_an_idle_adapter_breaks_no_limit_of_a_slow_server(make_profile: MakeProfile) -> None:
    """An adapter of rate 0 has no tokens, so that it is not counted among those whose mean ITL breaks a limit."""
    adapters = [Adapter(name, 8, rate) for name, rate in (("busy", 1.0), ("idle", 0.0))]
    given = Lengths.constant(20), Lengths.constant(10)
    run = simulate(Workload(adapters, *given), make_profile(), max_loras=2, duration_s=100.0, slo="mean_itl_ms=0.001")
    busy, idle = run.adapter_slo_used.tolist()
    assert (run.stable, idle) == (True, 0.0)
    assert busy > 1.0


@pytest.mark.parametrize("n", [0, 1, 2, 3, 19, 20, 21, 1000, 20001])
def test_quantiles_are_numpys(n: int) -> None:
    """Quantiles are those of `numpy.quantile`, to the bit, and the values stay in their order."""
    values = np.random.default_rng(n).lognormal(3.0, 1.0, n)
    shares, before = (0.0, 0.05, 0.5, 0.95, 0.99, 1.0), values.copy()
    found = quantiles(np.sort(values), *shares)
    np.testing.assert_array_equal(values, before)
    np.testing.assert_array_equal(found, np.quantile(values, shares) if n else np.full(6, np.nan))


def test_an_adapter_without_a_completed_request_is_judged_by_its_waits(make_profile: MakeProfile) -> None:
    """A limit that a request has outwaited is broken before it completes; a wait within it counts as nothing yet."""
    # a0 runs from 0 s to 1.5 s; a1 waits for its slot from 0.1 s; a2 has nothing to wait for
    sim = _one_slot(make_profile, (0.0, 0, 150), (0.1, 1, 400))
    for key, ms in (("p95_ttft_ms", 1400.0), ("mean_ttft_ms", 1400.0), ("p90_e2e_ms", 1900.0)):
        for limit_ms, kept in ((0.9 * ms, False), (1.1 * ms, True)):
            goal = Slo.only({key: limit_ms})
            found = judged_ms(replace(sim, workload=replace(sim.workload, slo=goal)), key)
            assert found[1] == (0.0 if kept else pytest.approx(ms, abs=20.0))
            assert found[2] == 0.0


def test_an_adapter_that_gets_no_answer_has_no_figure_and_is_the_worst(make_profile: MakeProfile) -> None:
    """Requests that wait in vain give no p95 of 0 but NaN, as the worst adapter's; with only requests that the end of
    the run cut off earlier, or none, it is 0; the limits are broken as they were."""
    # a0 holds the only slot until the end; a2 waits for it all the time, or hardly at all
    for sent_s, answer in ((0.2, False), (1.995, True)):
        sim = _one_slot(make_profile, *sorted([(0.0, 0, 80), (0.1, 0, 100), (0.9, 0, 400), (sent_s, 2, 5)]))
        sim = replace(sim, workload=replace(sim.workload, slo=Slo.of(60.0)))
        assert sim.completed_of.tolist() == [2.0, 0.0, 0.0]
        own, nothing_sent, cut = sim.adapter_pooled_p95_ttft_ms
        assert own > nothing_sent == 0.0
        assert cut == 0.0 if answer else math.isnan(cut)
        assert sim.worst_adapter_ttft_ms == pytest.approx(own if answer else math.nan, nan_ok=True)
        assert sim.to_dict()["worst_adapter_ttft_ms"] == (own if answer else None)
        assert judged_ms(sim, "p95_ttft_ms")[2] == (0.0 if answer else pytest.approx(1800.0))


@pytest.mark.parametrize(("tokens", "starved"), [(5, True), (400, False)])
def test_an_adapter_whose_95th_percentile_is_not_known_is_the_worst(
    make_profile: MakeProfile, tokens: int, starved: bool
) -> None:
    """More than 5 % of an adapter's requests without a first token, after longer waits than those of all answers, leave
    it without a p95, whether or not the server starves; requests that the end cuts off do not, nor do goals change."""

    def run(sent_s: list[float]) -> Run:
        """One slot: a1 has an answer before a0 holds the slot; a1's other requests wait until the end."""
        requests = [(0.1 * k, 0, 30) for k in range(1, 20)] + [
            (0.0, 1, 5),
            *((at_s, 1, tokens) for at_s in sent_s),
        ]
        time_s, owner, output = (np.array(column) for column in zip(*sorted(requests), strict=True))
        trace = RequestTrace(time_s, owner, np.full(len(owner), 10), output)
        fleet = Workload([Adapter("a0", 8, 1.0), Adapter("a1", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
        return simulate(replace(fleet, slo=Slo.of(1.0)), make_profile(), max_loras=1, duration_s=2.0)

    in_vain = run([0.2, 0.3, 0.4, 0.5])
    assert in_vain.starved == starved  # 400 tokens would not be due
    assert in_vain.completed_of[1] == 1.0
    own, unknown = in_vain.adapter_pooled_p95_ttft_ms
    assert own > 0.0
    assert math.isnan(unknown)
    assert math.isnan(in_vain.worst_adapter_ttft_ms)
    assert judged_ms(in_vain, "p95_ttft_ms").tolist() == [own, own]
    cut = run([1.995, 1.996, 1.997, 1.998])
    assert not cut.starved
    assert cut.adapter_pooled_p95_ttft_ms.tolist() == [cut.worst_adapter_ttft_ms] * 2


def test_late_answers_are_a_95th_percentile_of_their_own(make_profile: MakeProfile) -> None:
    """On a server that starves and answers in order, as many requests of each adapter wait at the end, none for longer
    than its answers took: each has its p95, as the worst adapter has."""
    fleet = Workload([Adapter(f"a{k}", 8, 4.0) for k in range(3)])
    sim = simulate(fleet, make_profile(max_num_seqs=4), max_loras=3, duration_s=100.0)
    assert sim.starved
    assert np.isnan(sim.raw.first_s).mean() > 0.2
    assert sim.worst_adapter_ttft_ms == sim.adapter_p95_ttft_ms.max() > 1000.0
