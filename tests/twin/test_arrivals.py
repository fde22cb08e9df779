"""Requests are drawn by the laws that the workload names, and the same for the same seed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.errors import ValidationError
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.sessions import Sessions
from packer.speculation import SpeculationSpec
from packer.testing.analytic import small_profile
from packer.twin import streams
from packer.twin.arrivals import (
    blocks_of_prefixes,
    cut_words,
    draw_marks,
    draw_requests,
    draw_times,
    unread_words,
)
from packer.twin.engine.content import blocks_of_sessions
from packer.twin.override import with_engine
from packer.twin.simulate import simulate
from packer.workload import Workload

KINDS = {
    "poisson": Arrivals(),
    "lognormal": Arrivals("lognormal", cv=2.0),
    "unpredictable": Arrivals("unpredictable", cv=2.0, period_s=100.0),
    "piecewise": Arrivals("piecewise", period_s=100.0, factors=(0.5, 1.5)),
    "bursty": Arrivals("bursty", common=Bursts(1.0, ((5.0, 0.5), (50.0, 0.5)))),
    "rising bursts": Arrivals("bursty", common=Bursts(0.5, ((5.0, 1.0),))).following((100.0, 0.5, 1.5)),
    "own bursts": Arrivals("bursty", common=Bursts(0.5, ((5.0, 1.0),)), own=Bursts(1.0, ((60.0, 1.0),))),
}
FLEET = Workload(
    [Adapter(f"a{i}", 8, rate) for i, rate in enumerate((0.2, 1.0, 3.0))],
    Lengths.gamma(223.0, 1.1),
    Lengths.lognormal(195.0, 1.0),
)


@pytest.mark.parametrize("arrivals", KINDS.values(), ids=KINDS)
def test_same_seed_same_bytes(arrivals: Arrivals) -> None:
    """Every column is the same for a seed, and another for another."""
    fleet = FLEET.with_arrivals(arrivals)
    one, two, other = (draw_requests(fleet, 500.0, seed) for seed in (7, 7, 8))
    for column in ("time_s", "adapter", "input_tokens", "output_tokens"):
        assert getattr(one, column).tobytes() == getattr(two, column).tobytes()
        assert getattr(one, column).tobytes() != getattr(other, column).tobytes()


@pytest.mark.parametrize("arrivals", KINDS.values(), ids=KINDS)
def test_what_was_drawn_before_changes_nothing(arrivals: Arrivals) -> None:
    """Requests are the same bytes whether the numbers of their seed are drawn anew or kept from other servers."""
    draw_requests(FLEET.scaled(2.0).with_arrivals(arrivals), 700.0, 7)
    kept = draw_requests(FLEET.with_arrivals(arrivals), 500.0, 7)
    streams.kept_for.cache_clear()
    anew = draw_requests(FLEET.with_arrivals(arrivals), 500.0, 7)
    for column in ("time_s", "adapter", "input_tokens", "output_tokens"):
        assert getattr(kept, column).tobytes() == getattr(anew, column).tobytes()


def test_threads_draw_what_one_draws() -> None:
    """Servers of one seed that are drawn at the same time, some with more requests, get the numbers that each would."""
    counts = [50_000, 10, 30_000, 1_000, 80_000, 5] * 4
    with ThreadPoolExecutor(6) as pool:
        for seed in range(3):
            found = list(pool.map(lambda n, seed=seed: streams.drawn_numbers(seed, 2, "standard_normal", n), counts))
            whole = streams.generator(seed, 2).standard_normal(max(counts))
            assert all(np.array_equal(each, whole[:n]) for each, n in zip(found, counts, strict=True))


@pytest.mark.parametrize("arrivals", KINDS.values(), ids=KINDS)
def test_requests_are_sorted_and_in_time(arrivals: Arrivals) -> None:
    """Times rise within [0, duration[ and every request has an adapter and at least one token each way."""
    requests = draw_requests(FLEET.with_arrivals(arrivals), 300.0, 1)
    assert 0 <= requests.time_s[0] < requests.time_s[-1] < 300.0
    assert np.all(np.diff(requests.time_s) >= 0)
    assert set(requests.adapter.tolist()) == {0, 1, 2}
    assert min(requests.input_tokens.min(), requests.output_tokens.min()) >= 1


@pytest.mark.parametrize("kind", ["poisson", "lognormal", "piecewise"])
def test_mean_rates_are_kept(kind: str) -> None:
    """Each adapter sends at its rate, within five standard deviations of the mean over twenty seeds."""
    fleet = FLEET.with_arrivals(KINDS[kind])
    counts = np.array([np.bincount(draw_requests(fleet, 1000.0, seed).adapter) for seed in range(20)])
    expected = FLEET.rates * 1000.0
    spread = 2.0 if kind == "lognormal" else 1.0  # the cv of gaps is that of counts × √n
    assert np.all(np.abs(counts.mean(axis=0) - expected) < 5 * spread * np.sqrt(expected / 20))


def test_quiet_adapters_in_bursts_send_at_their_rate() -> None:
    """A stream of a few long gaps is found in one of them more often than the gaps are long on average."""
    arrivals = Arrivals("lognormal", cv=4.0)
    fleet = Workload([Adapter(f"a{i}", 8, 0.003) for i in range(300)], arrivals=arrivals)
    sent = np.mean([len(draw_requests(fleet, 3600.0, seed)) for seed in range(8)])
    assert sent == pytest.approx(3600.0 * fleet.rate, rel=0.08)


def test_unpredictable_rates_move_within_their_span() -> None:
    """From period to period a rate doubles or halves, but stays within 1/span and span times the mean."""
    arrivals = Arrivals("unpredictable", cv=1.0, period_s=1000.0, span=4.0)
    fleet = Workload([Adapter("a", 8, 5.0)], arrivals=arrivals)
    factors = []
    for seed in range(12):
        times = draw_requests(fleet, 10_000.0, seed).time_s
        counts = np.histogram(times, bins=10, range=(0.0, 10_000.0))[0]
        factors.append(counts / 5000.0)
    table = np.array(factors)
    assert np.all(np.abs(table[:, 0] - 1.0) < 0.15)
    assert np.all((table > 0.25 * 0.8) & (table < 4.0 * 1.2))
    steps = np.abs(np.log2(table[:, 1:] / table[:, :-1]))
    assert np.all((np.abs(steps - 1.0) < 0.3) | (steps < 0.3))  # doubled or halved; clipped ones stand still
    assert table.max() > 3.0 > 0.4 > table.min()


def test_unpredictable_processes_alternate() -> None:
    """Within one stream, periods of bursty log-normal gaps alternate with Poisson ones."""
    arrivals = Arrivals("unpredictable", cv=8.0, period_s=1000.0, span=1.0)
    times = draw_requests(Workload([Adapter("a", 8, 20.0)], arrivals=arrivals), 8000.0, 3).time_s
    spread = []
    for k in range(8):
        gaps = np.diff(times[(times >= 1000 * k) & (times < 1000 * (k + 1))])
        spread.append(float(gaps.std() / gaps.mean()))
    bursty = [cv > 2.0 for cv in spread]
    assert bursty in ([True, False] * 4, [False, True] * 4)


@pytest.mark.parametrize("kind", ["poisson", "bursty", "own bursts"])
def test_piecewise_rates_repeat(kind: str) -> None:
    """All rates follow the factors, period after period, beside bursts, too, and a factor of 0 sends nothing."""
    fleet = FLEET.with_arrivals(KINDS[kind].following((200.0, 0.0, 2.0, 1.0)))
    runs = [draw_requests(fleet, 1200.0, seed) for seed in range(10)]
    counts = np.array([np.histogram(run.time_s, bins=6, range=(0.0, 1200.0))[0] for run in runs])
    expected = FLEET.rate * 200.0 * np.array([0.0, 2.0, 1.0, 0.0, 2.0, 1.0])
    assert not counts[:, [0, 3]].any()
    assert np.all(np.abs(counts.mean(axis=0) - expected) <= 5 * np.maximum(counts.std(axis=0), 1e-9) / np.sqrt(10))
    assert np.bincount(runs[0].adapter, minlength=3) == pytest.approx(FLEET.rates * 1200.0, rel=0.5)
    assert not len(draw_requests(fleet, 150.0, 0))


def test_adapters_choose_from_one_stream_of_piecewise_rates() -> None:
    """Piecewise arrivals are those of a Poisson process in another time: one stream, however many adapters."""
    fleet = FLEET.with_arrivals(KINDS["piecewise"])
    time_s, adapter = draw_times(fleet, 400.0, 3)
    assert adapter is None
    steady, _ = draw_times(FLEET, 400.0, 3)
    expected = np.interp(steady, (0.0, 50.0, 200.0, 250.0, 400.0), (0.0, 100.0, 200.0, 300.0, 400.0))
    assert time_s == pytest.approx(expected)


@pytest.mark.parametrize(("cv", "seed"), [(0.5, 1), (2.0, 2)])
def test_lognormal_gaps_have_their_law(cv: float, seed: int) -> None:
    """The gaps' logarithms are normal with the spread of the cv."""
    fleet = Workload([Adapter("a", 8, 10.0)], arrivals=Arrivals("lognormal", cv=cv))
    gaps = np.diff(draw_requests(fleet, 1000.0, seed).time_s)
    sigma = np.sqrt(np.log1p(cv**2))
    assert stats.kstest(np.log(gaps), stats.norm(-np.log(10.0) - sigma**2 / 2, sigma).cdf).pvalue > 1e-3


def test_poisson_gaps_and_adapters_have_their_law() -> None:
    """Gaps of the whole stream are exponential, and adapters are chosen by their rates."""
    requests = draw_requests(FLEET, 4000.0, 11)
    assert stats.kstest(np.diff(requests.time_s) * FLEET.rate, "expon").pvalue > 1e-3
    counts = np.bincount(requests.adapter, minlength=3)
    expected = len(requests) * FLEET.rates / FLEET.rate
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_many_adapters_are_chosen_exactly() -> None:
    """The table that finds adapters quickly agrees with the rates even where these differ a thousandfold."""
    rates = np.concatenate([np.full(300, 0.003), [3.0, 1e-4], np.full(98, 0.01)])
    fleet = Workload([Adapter(f"a{i}", 8, float(rate)) for i, rate in enumerate(rates)])
    owner = draw_marks(fleet, None, 400_000, 5).adapter
    counts = np.bincount(owner, minlength=400)
    expected = 400_000 * rates / rates.sum()
    assert np.all(np.abs(counts - expected) < 6 * np.sqrt(expected) + 5)


def test_requests_drawn_in_parts_are_those_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many requests are drawn together changes none of them, whether adapters have lengths of their own or not."""
    own = [Adapter(f"b{i}", 8, 0.5 + i, output_tokens=Lengths.gamma(50.0 + i, 1.2)) for i in range(9)]
    for fleet in (FLEET, Workload([*FLEET.adapters, *own], FLEET.input_tokens, FLEET.output_tokens)):
        found = []
        for part in (2**18, 7):
            monkeypatch.setattr("packer.arrays.PART", part)
            streams.kept_for.cache_clear()
            found.append(draw_requests(fleet, 20.0, 3))
        for column in ("time_s", "adapter", "input_tokens", "output_tokens"):
            assert getattr(found[0], column).tobytes() == getattr(found[1], column).tobytes()


def test_more_marks_do_not_change_the_first() -> None:
    """The first marks are the same however many are drawn, so that they can be drawn as needed."""
    few, many = draw_marks(FLEET, None, 50, 4), draw_marks(FLEET, None, 5000, 4)
    for column in ("adapter", "input_tokens", "output_tokens"):
        assert getattr(few, column).tolist() == getattr(many, column)[:50].tolist()


def test_lengths_have_the_true_mean_spread_and_correlation() -> None:
    """Drawn lengths keep mean and cv, rounding and the floor of one token aside, and correlate as given."""
    fleet = Workload(FLEET.adapters, FLEET.input_tokens, FLEET.output_tokens, length_correlation=-0.4)
    marks = draw_marks(fleet, None, 400_000, 2)
    for tokens, mean, cv in ((marks.input_tokens, 223.0, 1.1), (marks.output_tokens, 195.0, 1.0)):
        assert tokens.mean() == pytest.approx(mean, rel=0.01)
        assert tokens.std() / tokens.mean() == pytest.approx(cv, rel=0.02)
    scores = [stats.norm.ppf(stats.rankdata(x) / (len(x) + 1)) for x in (marks.input_tokens, marks.output_tokens)]
    assert np.corrcoef(*scores)[0, 1] == pytest.approx(-0.4, abs=0.01)


def test_adapters_keep_their_own_lengths() -> None:
    """An adapter with lengths of its own draws from them, the others from the workload's."""
    own = replace(FLEET.adapters[1], input_tokens=Lengths.constant(7.0), output_tokens=Lengths.constant(9.0))
    fleet = Workload([FLEET.adapters[0], own, FLEET.adapters[2]], FLEET.input_tokens, FLEET.output_tokens)
    marks = draw_marks(fleet, None, 20_000, 2)
    mine = marks.adapter == 1
    assert set(marks.input_tokens[mine].tolist()) == {7}
    assert set(marks.output_tokens[mine].tolist()) == {9}
    assert marks.input_tokens[~mine].mean() == pytest.approx(223.0, rel=0.05)


def test_prompts_share_the_prefix_of_their_adapter_alone() -> None:
    """Two prompts have the same id at a place if and only if it lies in the shared prefix of one adapter."""
    adapters = [
        replace(each, shared_prefix_tokens=tokens) for each, tokens in zip(FLEET.adapters, (100, 0, 40), strict=True)
    ]
    fleet = replace(FLEET, adapters=tuple(adapters))
    plain, marks = draw_marks(FLEET, None, 300, 5), draw_marks(fleet, None, 300, 5)
    assert marks.input_tokens.tolist() == plain.input_tokens.tolist()
    assert plain.prefix_ids is None
    assert marks.prefix_ids is not None
    blocks = blocks_of_prefixes(marks, marks.prefix_ids)
    seen: dict[int, set[tuple[int, int]]] = {}
    for k in range(300):
        ids = blocks.ids[blocks.starts[k] : blocks.starts[k + 1]].tolist()
        prompt, owner = int(marks.input_tokens[k]), int(marks.adapter[k])
        assert len(ids) == prompt // blocks.tokens
        shared = min(adapters[owner].shared_prefix_tokens, prompt - 1) // blocks.tokens
        for place, each in enumerate(ids):
            seen.setdefault(each, set()).add((owner, place) if place < shared else (-1 - k, place))
    assert all(len(places) == 1 for places in seen.values())
    assert len({place for places in seen.values() for place in places}) == len(seen)


def test_a_trace_is_replayed_and_cut() -> None:
    """A replayed trace is what was seen, up to the duration."""
    trace = RequestTrace(
        np.array([0.0, 1.0, 1.0, 5.0]), np.array([2, 0, 0, 1]), np.array([5, 6, 7, 8]), np.array([1, 2, 3, 4])
    )
    fleet = FLEET.with_arrivals(Arrivals("trace", trace=trace))
    requests = draw_requests(fleet, 5.0, 99)
    assert requests.time_s.tolist() == [0.0, 1.0, 1.0]
    assert requests.adapter.tolist() == [2, 0, 0]
    assert requests.input_tokens.tolist() == [5, 6, 7]
    assert requests.output_tokens.tolist() == [1, 2, 3]
    assert draw_times(fleet, 5.1, 0)[0].tolist() == trace.time_s.tolist()


def test_too_many_requests_are_refused() -> None:
    """Rates that no memory holds are an error that says the number, before anything is drawn."""
    with pytest.raises(ValidationError, match=r"1e\+06 req/s × 3,600 s"):
        draw_requests(Workload([Adapter("a", 8, 1e6)]), 3600.0, 0)


def test_slow_streams_may_send_nothing() -> None:
    """A rate of once a year gives an empty hour, whatever the process."""
    for arrivals in KINDS.values():
        fleet = Workload([Adapter("a", 8, 3e-8)], arrivals=arrivals)
        assert len(draw_requests(fleet, 3600.0, 0)) == 0


def test_unpredictable_mean_rate_follows_its_law() -> None:
    """The mean over many hours is that of the walk of factors: halved or doubled, cut at the span."""
    arrivals = Arrivals("unpredictable", cv=1.0, period_s=300.0, span=4.0)
    fleet = Workload([Adapter("a", 8, 2.0)], arrivals=arrivals)
    sent = [len(draw_times(fleet, 3600.0, seed)[0]) for seed in range(60)]
    levels = 2.0 ** np.arange(-2, 3)
    chance, means = np.array([0.0, 0.0, 1.0, 0.0, 0.0]), []
    for _period in range(12):
        means.append(chance @ levels)
        moved = np.zeros(5)
        for k in range(5):
            moved[max(k - 1, 0)] += chance[k] / 2
            moved[min(k + 1, 4)] += chance[k] / 2
        chance = moved
    expected = 7200.0 * np.mean(means)
    assert abs(np.mean(sent) - expected) < 4 * np.std(sent) / np.sqrt(60)
    assert np.mean(means) > 1.2  # doubling adds more than halving takes away


def test_requests_that_are_cut_are_counted() -> None:
    """A server that takes no longer requests has less to do: whoever reads its figures learns how many were cut."""
    profile = small_profile()  # max_model_len 2048
    long = Adapter("long", 8, 1.0, Lengths.constant(2000), Lengths.constant(49))
    fleet = Workload([long, Adapter("short", 8, 3.0, Lengths.constant(1999), Lengths.constant(49))])
    (words,) = cut_words(fleet, [profile, profile])
    share = float(words.partition("%")[0])
    assert share == pytest.approx(25.0, abs=2.0)
    assert f"more than 2,048 tokens, the max_model_len of {profile.name}" in words
    columns = [np.array(column) for column in ([0.0, 1.0, 2.0], [0, 0, 1], [2040, 9, 9], [9, 9, 9])]
    replayed = fleet.with_arrivals(Arrivals("trace", trace=RequestTrace(*columns)))
    assert cut_words(replayed, [profile])[0].startswith("33.3% of the requests")
    assert not cut_words(Workload([Adapter("a", 8, 1.0)], *[Lengths.gamma(90.0, 1.0)] * 2), [profile])


def test_columns_that_no_server_reads_are_named() -> None:
    """Priorities, acceptance and shared prefixes that change nothing, because of the servers' settings, are named; of
    servers that read them, and of a fleet without them, nothing is said."""
    old = load_profile("h100-64gb/llama-3.1-8b-instruct")
    adapters = [Adapter("a", 8, 1.0, priority=1, acceptance=0.5, shared_prefix_tokens=99), Adapter("b", 8, 1.0)]
    said = unread_words(Workload(adapters), [old])
    assert [words.split()[0] for words in said] == ["Priorities", "Acceptance", "Prompts"]
    drafts = SpeculationSpec("mtp", 1, 0.5)
    heeding = with_engine(old, vllm_version="0.32.0", scheduling_policy="priority")
    heeding = replace(heeding, engine=replace(heeding.engine, speculation=drafts))
    assert not unread_words(Workload(adapters), [old, heeding])
    assert not unread_words(Workload(adapters[1:]), [old])


@pytest.mark.filterwarnings("error")
def test_no_request_of_an_empty_trace_is_cut() -> None:
    """A trace without requests has none that exceed a server's context, and no mean of nothing is taken."""
    fleet = Workload([Adapter("a", 8, 1.0)]).replaying(RequestTrace([], [], [], []))
    assert not cut_words(fleet, [load_profile("h100-64gb/llama-3.1-8b-instruct")])


def test_turns_of_a_trace_begin_with_all_that_was_said() -> None:
    """Requests share the blocks of the turns before them, unless they are shorter than what was said: by hand."""
    prompt = np.array([40, 100, 70, 64, 260, 50])
    output = np.array([30, 60, 20, 16, 9, 70])
    session = np.array([0, 0, 1, 0, 0, 1])  # request 3 is shorter than the 160 tokens before it, request 5 than 90
    adapter = np.zeros(6, dtype=np.int64)
    blocks = blocks_of_sessions(session, adapter, prompt, output, 16)
    assert blocks is not None
    ids = [set(blocks.ids[a:b].tolist()) for a, b in pairwise(blocks.starts.tolist())]
    assert [len(each) for each in ids] == ((prompt + output) // 16).tolist()
    common = {(i, j): len(ids[i] & ids[j]) for i in range(6) for j in range(i)}
    assert {pair: n for pair, n in common.items() if n} == {(1, 0): 70 // 16, (4, 3): 80 // 16}
    assert blocks_of_sessions(np.arange(6), adapter, prompt, output, 16) is None


@pytest.mark.parametrize("turns", [1.5, 5.0])
def test_a_replayed_log_of_sessions_hits_as_the_sessions_did(turns: float) -> None:
    """Drawn sessions without their blocks are served as with them: the lengths of turns say what they share."""
    fleet = replace(FLEET, sessions=Sessions(turns, think_s=10.0, turn_tokens=40.0))
    drawn = draw_requests(fleet, 300.0, 5)
    profile = with_engine(load_profile("h100-64gb/llama-3.1-8b-instruct"), vllm_version="0.32.0")
    runs = [
        simulate(replace(FLEET, arrivals=Arrivals("trace", trace=trace)), profile, max_loras=3, duration_s=300.0)
        for trace in (drawn, replace(drawn, blocks=None), replace(drawn, blocks=None, sessions=None))
    ]
    assert runs[0].prefix_hit_rate == runs[1].prefix_hit_rate > runs[2].prefix_hit_rate == 0.0
    np.testing.assert_array_equal(runs[0].raw.finish_s, runs[1].raw.finish_s)


def test_requests_of_a_replayed_trace_keep_sessions_and_priorities() -> None:
    """What is sent to a real server is what the twin replays."""
    ones = np.ones(4, dtype=np.int64)
    sessions, priority = np.array([0, 0, 1, 1]), np.array([3, 1, 2, 0])
    trace = RequestTrace(np.arange(4.0), 0 * ones, 50 * ones, 9 * ones, sessions=sessions, priority=priority)
    fleet = Workload([Adapter("a", 8, 1.0)], arrivals=Arrivals("trace", trace=trace))
    found = draw_requests(fleet, 2.5, 0)
    assert found.sessions is not None
    assert found.priority is not None
    assert (found.sessions.tolist(), found.priority.tolist()) == ([0, 0, 1], [3, 1, 2])


def test_requests_beyond_memory_are_counted_with_their_factors() -> None:
    """Rates times a large factor are refused as rates that are as high are, before the requests are drawn."""
    arrivals = Arrivals("piecewise", factors=(1000.0,))
    with pytest.raises(ValidationError, match=r"at most 100,000,000 requests .* got 100,000 req/s"):
        draw_requests(Workload([Adapter("a", 8, 100.0)], arrivals=arrivals), 3600.0, 0)
