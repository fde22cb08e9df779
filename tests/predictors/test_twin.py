"""Results with as little simulation as they need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.settings import Settings
from packer.testing.contracts import PredictorContract
from packer.twin.simulate import simulate
from packer.twin.until_clear import DURATION_S, EDGE_ERRORS, at_edge, evaluate_until_clear, evaluation_of, share_error
from packer.twin.watch import PARTS, BrokenError, QueueWatch
from packer.workload import Workload


def _fleet(rate: float, n: int = 12) -> Workload:
    return Workload([Adapter(f"a{i}", 8, rate) for i in range(n)])


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.33, 0.45, 0.8, 2.0])
@pytest.mark.parametrize("slots", [4, 12])
def test_shortcuts_keep_the_verdict(small: Profile, rate: float, slots: int) -> None:
    """Short runs and carried-on throughputs say the same as the whole hour."""
    fleet = _fleet(rate)
    whole = [
        simulate(fleet, small, max_loras=slots, max_lora_rank=8, duration_s=DURATION_S, seed=seed) for seed in (11, 12)
    ]
    share = float(np.mean([sim.served_share for sim in whole]))
    found = evaluate_until_clear(fleet, small, Settings(slots, 8))
    if abs(share - 0.9) > 0.02:
        assert found.evaluation.starved == (share < 0.9)
    assert found.evaluation.served_share == pytest.approx(share, rel=0.06)


def test_other_seeds_run_where_chance_could_decide(small: Profile) -> None:
    """A server is simulated with further seeds if its share is within three standard errors of what starves, only."""
    runs = {n: simulate(_fleet(0.6, 12), small, max_loras=4, duration_s=n, seed=1) for n in (60.0, 3600.0)}
    errors = {n: share_error(run) for n, run in runs.items()}
    tokens = runs[60.0].raw.requests.input_tokens + runs[60.0].raw.requests.output_tokens
    assert errors[60.0] == pytest.approx(float(np.sqrt((tokens**2.0).sum()) / tokens.sum()))
    assert errors[3600.0] < 0.01 < 0.02 < errors[60.0]
    for n, at in ((60.0, True), (3600.0, False)):
        vars(runs[n])["served_share"] = 0.9 + 0.035  # as if so much were served
        assert at_edge(runs[n]) is at
        vars(runs[n])["served_share"] = 0.9 - 0.9 * EDGE_ERRORS * errors[3600.0]
        assert at_edge(runs[n])


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.3, 0.36, 0.45, 0.8, 3.0])
@pytest.mark.parametrize("slots", [2, 4, 12])
def test_short_runs_that_end_early_change_nothing(
    small: Profile, rate: float, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short run that ends once its server is certainly not calm leaves each figure as it would be without."""
    found = evaluate_until_clear(_fleet(rate), small, Settings(slots, 8))
    monkeypatch.setattr("packer.twin.server.PARTS", ())
    whole = evaluate_until_clear(_fleet(rate), small, Settings(slots, 8))
    assert repr(found) == repr(whole)


def test_a_run_ends_once_its_queue_is_too_long(small: Profile) -> None:
    """The queue of an overloaded server is found out early; a server without one runs to the end."""
    with pytest.raises(BrokenError) as error:
        simulate(_fleet(3.0), small, max_loras=4, duration_s=900.0, watch=QueueWatch(2.0))
    assert error.value.part == PARTS[0]
    calm = simulate(_fleet(0.1), small, max_loras=12, duration_s=900.0, watch=QueueWatch(2.0))
    assert calm.mean_waiting <= 2.0


@pytest.mark.parametrize(("rate", "stable"), [(0.2, True), (6.0, False)])
def test_a_queue_that_grows_is_told(small: Profile, rate: float, stable: bool) -> None:
    """An evaluation says whether the queue grows, as the simulation does."""
    assert evaluate_until_clear(_fleet(rate), small, Settings(12, 8)).evaluation.stable is stable


def test_chance_does_not_starve_quiet_servers(small: Profile) -> None:
    """A server with a request every few minutes serves it, however few the hour happened to bring."""
    for seed in range(8):
        found = evaluate_until_clear(_fleet(0.003, 1), small, Settings(1, 8), seed=seed)
        assert not found.evaluation.starved
        assert found.evaluation.served_share > 0.97


def test_clear_cases_are_short(small: Profile) -> None:
    """A calm server takes one short run, one at the edge several whole ones."""
    calm = evaluate_until_clear(_fleet(0.1), small, Settings(12, 8))
    assert (calm.runs, calm.duration_s < DURATION_S) == (1, True)


@pytest.mark.parametrize(("rate", "share"), [(0.1, 1.0), (60.0, 0.0)])
def test_goodput_leaves_out_what_the_end_of_a_run_cuts_off(small: Profile, rate: float, share: float) -> None:
    """A server that answers every request in time has its load as goodput, however short its simulation, so that chance
    at its end ranks no plans; requests that pile up count as late."""
    found = evaluate_until_clear(_fleet(rate), small, Settings(12, 8)).evaluation
    assert found.goodput_tok_s / found.offered_tok_s == pytest.approx(share, abs=0.001)


def test_refused_requests_are_no_goodput(small: Profile) -> None:
    """Requests that a full server refuses lessen its goodput as late answers do."""
    engine = replace(small.engine, version="0.30.0", max_num_queued_reqs=60)
    run = simulate(_fleet(1.0), replace(small, engine=engine), max_loras=2, max_lora_rank=8, duration_s=3600.0)
    assert 2 * run.refused_by_server > run.completed
    assert evaluation_of([run]).goodput_tok_s == pytest.approx(run.goodput_tok_s, rel=0.02)


@pytest.mark.usefixtures("whole_hours")
@pytest.mark.parametrize("seed", range(4))
def test_the_limits_are_judged_by_the_hour_of_a_simulation(seed: int) -> None:
    """A calm server that breaks the limits in a short run, by the loads of its start, is judged by a whole hour: it
    keeps them as `simulate` says."""
    rng = np.random.default_rng(1)
    rates, ranks = rng.lognormal(-2.5, 1.2, 80), rng.choice([8, 16, 32, 64], 80)
    fleet = Workload(
        [Adapter(f"a{i}", int(rank), float(rate)) for i, (rank, rate) in enumerate(zip(ranks, rates, strict=True))]
    )
    server = load_profile("h100-64gb/llama-3.1-8b-instruct")
    found = evaluate_until_clear(fleet, server, Settings(61, 64), seed=seed)
    hour = simulate(fleet, server, max_loras=61, max_lora_rank=64, seed=seed)
    assert hour.slo_used < 1.0
    assert found.evaluation.slo_used < 1.0
    assert found.duration_s < DURATION_S or found.evaluation.slo_used == hour.slo_used


def test_a_replayed_trace_is_evaluated_whole(small: Profile) -> None:
    """A trace is replayed to its end, once, and its offered load is what it holds."""
    n = 400
    trace = RequestTrace(
        np.linspace(0.0, 1800.0, n),
        np.arange(n) % 2,
        np.full(n, 100, dtype=np.int64),
        np.full(n, 50, dtype=np.int64),
    )
    fleet = Workload(_fleet(0.1, 2).adapters, arrivals=Arrivals("trace", trace=trace))
    found = evaluate_until_clear(fleet, small, Settings(2, 8))
    assert found.runs == 1
    assert found.evaluation.offered_tok_s == pytest.approx(150 * n / found.duration_s, rel=0.01)


def _replayed(times: npt.NDArray[np.float64], tokens: int = 50, names: int = 2) -> Workload:
    n = len(times)
    lengths = np.full(n, tokens, dtype=np.int64)
    trace = RequestTrace(times, np.arange(n) % names, 2 * lengths, lengths)
    return Workload(_fleet(0.1, names).adapters, arrivals=Arrivals("trace", trace=trace))


def test_a_rush_after_the_first_hour_starves_a_trace(small: Profile) -> None:
    """What a trace brings in its second hour counts as much as what it brings in its first."""
    calm = np.linspace(0.0, 3599.0, 60)
    rush = np.linspace(3600.0, 4500.0, 200_000)
    fleet = _replayed(np.concatenate([calm, rush]))
    assert not evaluate_until_clear(_replayed(calm), small, Settings(2, 8)).evaluation.starved
    assert evaluate_until_clear(fleet, small, Settings(2, 8)).evaluation.starved


@pytest.mark.parametrize("times", [[0.0], [0.0, 59.9], [5.0, 20.0, 40.0, 60.0]])
def test_a_few_requests_do_not_starve_a_trace(small: Profile, times: list[float]) -> None:
    """A request that the end of the trace cuts off says nothing about the server."""
    found = evaluate_until_clear(_replayed(np.array(times), tokens=200), small, Settings(2, 8))
    assert not found.evaluation.starved


def test_piecewise_rates_are_evaluated_over_whole_cycles(small: Profile) -> None:
    """A rush in the second hour of a day is seen, and rates that only change within the hour take the hour."""
    fleet = _fleet(0.1)
    day = fleet.with_arrivals(Arrivals("piecewise", period_s=3600.0, factors=(0.1, 200.0)))
    found = evaluate_until_clear(day, small, Settings(12, 8))
    assert found.duration_s % 7200.0 == 0.0
    assert found.evaluation.starved
    quick = fleet.with_arrivals(Arrivals("piecewise", period_s=300.0, factors=(0.5, 1.5)))
    assert evaluate_until_clear(quick, small, Settings(12, 8)).duration_s % 600.0 == 0.0


def test_memory_errors_need_no_simulation(small: Profile) -> None:
    """Slots that don't fit give a memory error with zero throughput and no latencies."""
    found = evaluate_until_clear(_fleet(0.1), small, Settings(100_000, 512)).evaluation
    assert found.memory_error
    assert found.starved
    assert found.total_token_throughput == 0.0
    assert np.isnan(found.mean_itl_ms)


def test_equal_content_is_simulated_once(small: Profile) -> None:
    """Bins that differ in names and order only share one answer; a share of the rate makes another."""
    fleet = _fleet(0.05)
    twin = TwinPredictor(workers=1)
    bins = [
        Bin((0, 1, 2), Settings(3, 8), small),
        Bin((5, 9, 7), Settings(3, 8), small),
        Bin((2, 1, 0), Settings(3, 8), small),
    ]
    found = twin.evaluate(fleet, bins)
    assert (twin.requested, twin.simulated) == (3, 1)
    assert len(set(found.total_token_throughput.tolist())) == 1
    twin.evaluate(
        fleet, [Bin((0, 1, 2), Settings(3, 8), small, (0.5, 1.0, 1.0)), Bin((0, 1, 2), Settings(2, 8), small)]
    )
    assert twin.simulated == 3


def test_threads_change_nothing(small: Profile) -> None:
    """One thread and four give the same answers."""
    fleet = Workload([Adapter(f"a{i}", 8, 0.02 * (i + 1)) for i in range(8)])
    bins = [Bin(tuple(range(k)), Settings(k, 8), small) for k in range(1, 9)]
    one, four = TwinPredictor(workers=1).evaluate(fleet, bins), TwinPredictor(workers=4).evaluate(fleet, bins)
    np.testing.assert_array_equal(one.total_token_throughput, four.total_token_throughput)
    np.testing.assert_array_equal(one.mean_itl_ms, four.mean_itl_ms)


class TestTwinKeepsTheContract(PredictorContract):
    """The twin as any other predictor."""

    @pytest.fixture
    def predictor(self) -> TwinPredictor:
        """The twin."""
        return TwinPredictor()
