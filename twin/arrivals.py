"""Draw requests: when, for which adapter, how long. Everything comes from one seed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packer.adapter import changed
from packer.arrays import FloatArray, IntArray, in_parts
from packer.arrival import Arrivals, RequestTrace
from packer.blocks import Blocks
from packer.errors import ValidationError
from packer.lengths import MAX_TOKENS, Lengths
from packer.profile import Profile
from packer.sessions import FIRST_TOKEN_S, PER_TOKEN_S
from packer.twin.bursts import in_bursts, own_streams
from packer.twin.engine.content import Content, blocks_of_sessions, chained, content_of_blocks, content_of_prefixes
from packer.twin.engine_rules import rules_of
from packer.twin.own_lengths import at_normal, identities, own_lengths
from packer.twin.streams import MOST_KEPT, common_clock, drawn_numbers, first_of, generator, kept_for
from packer.workload import Workload

MAX_REQUESTS = 100_000_000
SIDES = ("input_tokens", "output_tokens")
EARLIER = 6.0  # Sessions are drawn from this many mean lengths of the longest sessions before the run.
MOST_EARLIER = 2_000_000  # Most expected requests of sessions before the run; further sessions are repetitions.
BLOCK_TOKENS = 16  # Tokens of a block of shared prefixes: the default `block_size` of vLLM.


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """Properties of requests other than their times, int64 (n,) each: adapter, input and output tokens.

    Shared prefixes are given by `blocks` of a trace, or by the first `prefix_ids` (n,) blocks of BLOCK_TOKENS tokens,
    which requests of one adapter share, or by `sessions` (n,) of a trace without blocks; all None: no two requests
    share any. `priority`: of each request, None: that of its adapter.
    """

    adapter: IntArray
    input_tokens: IntArray
    output_tokens: IntArray
    blocks: Blocks | None = None
    prefix_ids: IntArray | None = None
    priority: IntArray | None = None
    sessions: IntArray | None = None

    def content(self) -> Content | None:
        """Return which requests share prefixes, as prefix caching takes it; None: no two."""
        if self.prefix_ids is not None:
            return content_of_prefixes(self.adapter, self.prefix_ids, BLOCK_TOKENS)
        found = self.known_blocks()
        return None if found is None else content_of_blocks(self.adapter, found)

    def known_blocks(self) -> Blocks | None:
        """Return `blocks`, or those of the sessions; None without either."""
        if self.blocks is not None or self.sessions is None:
            return self.blocks
        return blocks_of_sessions(self.sessions, self.adapter, self.input_tokens, self.output_tokens, BLOCK_TOKENS)


def draw_requests(workload: Workload, duration_s: float, seed: int) -> RequestTrace:
    """Draw the requests of `duration_s` seconds; a replayed trace is cut there."""
    if workload.has_sessions:
        return _draw_sessions(workload, duration_s, seed)
    time_s, adapter = draw_times(workload, duration_s, seed)
    marks = draw_marks(workload, adapter, len(time_s), seed)
    blocks = marks.blocks if marks.prefix_ids is None else blocks_of_prefixes(marks, marks.prefix_ids)
    return RequestTrace(
        time_s, marks.adapter, marks.input_tokens, marks.output_tokens, blocks=blocks, sessions=marks.sessions,
        priority=marks.priority,
    )  # fmt: skip


def replaying(workload: Workload, duration_s: float, seed: int) -> Workload:
    """Return the workload with the sessions of `duration_s` seconds drawn, as a trace; unchanged without sessions."""
    if not workload.has_sessions:
        return workload
    return workload.replaying(_draw_sessions(workload, duration_s, seed))


def draw_times(workload: Workload, duration_s: float, seed: int) -> tuple[FloatArray, IntArray | None]:
    """Draw sorted arrival times in [0, duration_s[ and the adapter of each; None if it does not depend on the time.
    Poisson streams are drawn as their superposition: one stream whose requests choose their adapters. Raises
    `ValidationError`: there would be more requests than fit into memory."""
    arrivals, rates = workload.arrivals, workload.rates
    if (trace := arrivals.trace) is not None:
        n = int(np.searchsorted(trace.time_s, duration_s, side="left"))
        return trace.time_s[:n], trace.adapter[:n]
    rate = arrivals.mean_factor * workload.rate
    if rate * duration_s > MAX_REQUESTS:
        rule = f"Expected at most {MAX_REQUESTS:,} requests (rate × duration),"
        raise ValidationError(f"{rule} got {rate:,.6g} req/s × {duration_s:,.6g} s: simulate a shorter time.")
    alone = arrivals.own is not None or arrivals.kind in ("lognormal", "unpredictable")
    kept = kept_for(seed, duration_s, arrivals, rates.tobytes() if alone else workload.rate)
    drawn = kept[0] if kept else _draw_times(workload, duration_s, seed)
    if len(drawn[0]) <= MOST_KEPT:
        kept[:] = (drawn,)
    # The caller gets arrays of its own, because others may be given the kept ones.
    return drawn[0].copy(), None if drawn[1] is None else drawn[1].copy()


def _draw_times(workload: Workload, duration_s: float, seed: int) -> tuple[FloatArray, IntArray | None]:
    """See `draw_times`."""
    arrivals, rates, expected = workload.arrivals, workload.rates, workload.rate * duration_s
    if arrivals.cycle_s:
        edges, reached = _cycles(arrivals, duration_s)
        if not reached[-1]:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        steady = workload.with_arrivals(arrivals.following(()))
        time_s, adapter = _draw_times(steady, float(reached[-1]), seed)
        return in_bursts((edges, reached), time_s, duration_s), adapter
    if arrivals.own is not None:
        return own_streams(generator(seed, 0), generator(seed, 4), arrivals, rates, duration_s)
    if arrivals.kind in ("lognormal", "unpredictable"):
        return _by_adapter(generator(seed, 0), arrivals, rates, duration_s)
    time_s = np.cumsum(
        # Six standard deviations beyond the mean: the gaps practically always reach the end.
        drawn_numbers(seed, 0, "standard_exponential", int(expected + 6 * np.sqrt(expected) + 16))
    )
    time_s /= workload.rate
    time_s = time_s[: np.searchsorted(time_s, duration_s)]
    if arrivals.common is not None:
        time_s = in_bursts(common_clock(seed, arrivals.common, duration_s), time_s, duration_s)
    return time_s, None


def draw_marks(workload: Workload, adapter: IntArray | None, n: int, seed: int) -> Marks:
    """Draw the marks of the first `n` requests; drawing n + 1 gives the same first n.

    `adapter`: adapter of each request; None: each request chooses one by the rates. Lengths are correlated as the
    workload says (a Gaussian copula). A replayed trace has its own marks.
    """
    marks = _lengths_of(workload, adapter, n, seed)
    if workload.arrivals.trace is not None or not workload.shared_prefix_tokens.any():
        return marks
    prefix = np.minimum(workload.shared_prefix_tokens[marks.adapter], marks.input_tokens - 1)
    return replace(marks, prefix_ids=prefix // BLOCK_TOKENS)


def blocks_of_prefixes(marks: Marks, shared: IntArray) -> Blocks:
    """Return blocks of requests: the first `shared` (n,) belong to their adapter, all others are unique."""
    counts = marks.input_tokens // BLOCK_TOKENS
    return chained(marks.adapter, shared, counts, np.cumsum(counts) - counts, BLOCK_TOKENS)


def _lengths_of(workload: Workload, adapter: IntArray | None, n: int, seed: int) -> Marks:
    """Draw marks without prefixes, or take the marks of a replayed trace."""
    trace = workload.arrivals.trace
    if trace is not None:
        ids = trace.blocks
        if ids is not None and n < len(trace):
            ids = ids.take(slice(n))
        priority = None if trace.priority is None else trace.priority[:n]
        sessions = None if trace.sessions is None else trace.sessions[:n]
        return Marks(trace.adapter[:n], trace.input_tokens[:n], trace.output_tokens[:n], ids, None, priority, sessions)
    own = [own_lengths(workload, side) for side in SIDES]
    if adapter is not None:
        return _marks(workload, own, adapter[:n], seed)
    shares = np.round(np.cumsum(workload.rates) / workload.rates.sum(), 12)  # the same in any unit
    kept = kept_for(seed, workload.length_correlation, shares.tobytes(), *map(identities, own))
    marks = kept[0] if kept else None
    if marks is None or len(marks.adapter) < n:
        marks = _marks(workload, own, _choose(drawn_numbers(seed, 1, "random", n), shares), seed)
        if n <= MOST_KEPT:
            # The key has ids of the lengths: keep these objects, so that no others get their ids.
            kept[:] = marks, own
    return Marks(marks.adapter[:n], marks.input_tokens[:n], marks.output_tokens[:n])


def unread_words(workload: Workload, profiles: Iterable[Profile]) -> tuple[str, ...]:
    """Return a sentence for each column of the workload that no server with one of these profiles reads."""
    engines, trace = [profile.engine for profile in profiles], workload.arrivals.trace
    marked = trace is not None and trace.priority is not None
    given = {
        "Priorities have no effect: no server has --set scheduling-policy=priority": (
            marked or len({adapter.priority for adapter in workload.adapters}) > 1,
            any(engine.scheduling_policy == "priority" for engine in engines),
        ),
        "Acceptance has no effect: no server has speculative decoding (--set speculation=…)": (
            any(adapter.acceptance is not None for adapter in workload.adapters),
            any(engine.speculation is not None for engine in engines),
        ),
        "Prompts that begin alike save nothing: no server has --set prefix-caching=on": (
            workload.shares_prefixes or (trace is not None and trace.blocks is not None),
            any(rules_of(engine).prefix_caching for engine in engines),
        ),
    }
    return tuple(words for words, (column, read) in given.items() if column and not read)


def cut_words(workload: Workload, profiles: Iterable[Profile]) -> tuple[str, ...]:
    """Return a sentence for each `max_model_len` that one request in a thousand exceeds: servers cut such requests."""
    longest = {profile.engine.max_model_len: profile.name for profile in profiles}
    return tuple(
        f"{share:.1%} of the requests have more than {most:,} tokens, the max_model_len of {longest[most]}: they count "
        "as cut to it, where vLLM refuses them or ends their output"
        for most, share in cut_shares(workload, longest).items()
        if share >= 0.001
    )


def cut_shares(workload: Workload, longest: Collection[int]) -> dict[int, float]:
    """Return the share of the requests that have more tokens than each of these lengths; {} if none has."""
    means = workload.mean_input_tokens + workload.mean_output_tokens
    if workload.arrivals.trace is None and 20.0 * means.max() <= min(longest, default=0):
        return {}  # draws do not reach so far into the tail
    marks = draw_marks(replaying(workload, 10_000 / workload.rate, 0), None, 10_000, 0)
    tokens = marks.input_tokens + marks.output_tokens
    return {most: float(np.mean(tokens > most)) for most in longest if len(tokens)}


def _marks(workload: Workload, own: list[list[Lengths]], owner: IntArray, seed: int) -> Marks:
    """Return marks of requests of the adapters `owner`, with the lengths `own`."""
    rho, n = workload.length_correlation, len(owner)

    def tokens(side: int) -> IntArray:
        lengths = own[side]
        if len(set(map(id, lengths))) == 1:
            return _tokens(lengths[0], side, rho, seed, n)
        return at_normal(lengths, owner, _scores(side, rho, seed, n))

    return Marks(owner, tokens(0), tokens(1))


def _scores(side: int, rho: float, seed: int, n: int) -> FloatArray:
    """Return normal scores of the lengths of the first n requests; scores of outputs and prompts are correlated."""
    z = drawn_numbers(seed, 2 + side, "standard_normal", n)
    if side and rho:
        z = z * math.sqrt(1.0 - rho * rho) + rho * _scores(0, rho, seed, n)
    return z


def _tokens(lengths: Lengths, side: int, rho: float, seed: int, n: int) -> IntArray:
    """Return the lengths of the first n requests if all adapters have the same, int64 (n,), as `drawn_numbers`."""

    def draw(most: int) -> IntArray:
        z = _scores(side, rho, seed, most)
        return in_parts(lambda part: lengths.at_normal(z[part]), len(z))

    return first_of(kept_for(seed, side, id(lengths), rho), n, draw, lengths)


def _choose(u: FloatArray, cumulative: FloatArray) -> IntArray:
    """Return the adapters of requests with these uniform scores, by the cumulative shares of their rates."""
    # A table of 2^k cells finds most adapters by one look-up; binary search over 384 rates is 5 times slower.
    last = len(cumulative) - 1
    cells = 1 << max(10, last.bit_length() + 3)
    start = np.minimum(np.searchsorted(cumulative, np.arange(cells) / cells, side="right"), last)

    def chosen(part: slice) -> IntArray:
        adapter = start[(u[part] * cells).astype(np.int64)]
        late = np.flatnonzero(u[part] >= cumulative[adapter])
        adapter[late] = np.minimum(np.searchsorted(cumulative, u[part][late], side="right"), last)
        return adapter

    return in_parts(chosen, len(u))


def _by_adapter(
    rng: np.random.Generator, arrivals: Arrivals, rates: FloatArray, duration_s: float
) -> tuple[FloatArray, IntArray]:
    """Draw streams that are not Poisson, one adapter after another, and merge them."""
    times, owners = [], []
    for i, rate in enumerate(rates):
        if arrivals.kind == "lognormal":
            stream = _renewal(rng, rate, arrivals.cv, 0.0, duration_s)
        else:
            stream = _unpredictable(rng, arrivals, rate, duration_s)
        times.append(stream)
        owners.append(np.full(len(stream), i, dtype=np.int64))
    time_s, adapter = np.concatenate(times), np.concatenate(owners)
    order = np.argsort(time_s, kind="stable")
    return time_s[order], adapter[order]


def _renewal(rng: np.random.Generator, rate: float, cv: float, start_s: float, end_s: float) -> FloatArray:
    """Draw log-normal gaps with mean 1/rate; the stream has begun before: the first gap is the rest of one. A moment
    falls into a gap in proportion to its length. Log-normal gaps so weighted are longer by exp(sigma²)."""
    span = (end_s - start_s) * rate
    sigma = float(np.sqrt(np.log1p(cv**2)))
    pieces: list[FloatArray] = []
    reached = start_s
    while reached < end_s:
        gaps = rng.lognormal(-0.5 * sigma**2, sigma, int(span + 4 * np.sqrt(span) * (1 + cv)) + 8) / rate
        if not pieces:
            gaps[0] *= rng.random() * (1.0 + cv**2)
        times = reached + np.cumsum(gaps)
        pieces.append(times)
        reached = float(times[-1])
    time_s = np.concatenate(pieces)
    return time_s[time_s < end_s]


def _cycles(arrivals: Arrivals, duration_s: float) -> tuple[FloatArray, FloatArray]:
    """Return the edges of the periods of a run and the integral of the rates' factor up to each, float64 (n + 1,)."""
    edges = np.append(np.arange(0.0, duration_s, arrivals.period_s), duration_s)
    weighed = np.diff(edges) * np.resize(arrivals.factors, len(edges) - 1)
    return edges, np.concatenate(([0.0], np.cumsum(weighed)))


def _unpredictable(rng: np.random.Generator, arrivals: Arrivals, rate: float, duration_s: float) -> FloatArray:
    """Draw the paper's unpredictable scenario: each period switches the process, and halves or doubles the rate."""
    pieces = []
    factor, poisson = 1.0, bool(rng.random() < 0.5)
    for start in np.arange(0.0, duration_s, arrivals.period_s).tolist():
        end, here = min(start + arrivals.period_s, duration_s), rate * factor
        if poisson:
            pieces.append(np.sort(rng.uniform(start, end, rng.poisson(here * (end - start)))))
        else:
            pieces.append(_renewal(rng, here, arrivals.cv, start, end))
        poisson = not poisson
        doubled = factor * (2.0 if rng.random() < 0.5 else 0.5)
        factor = min(max(doubled, 1.0 / arrivals.span), arrivals.span)
    return np.concatenate(pieces)


def _draw_sessions(workload: Workload, duration_s: float, seed: int) -> RequestTrace:
    """Draw the requests of `duration_s` seconds in sessions; some sessions began earlier (see `packer.sessions`).

    First turns arrive as the workload says, at the rate over the mean number of turns. They are drawn from so long
    before the run that all but e^-6 of the sessions under way at its beginning are included. Where these would be more
    than MOST_EARLIER requests, they are drawn from a shorter time, and repeated with this period: so rates are kept.
    """
    own, outputs = workload.sessions_by_adapter, workload.mean_output_tokens
    turns = np.array([1.0 if each is None else each.turns for each in own])
    gaps_s = [0.0 if each is None else each.gap_s(mean) for each, mean in zip(own, outputs.tolist(), strict=True)]
    whole_cycles_s, repeated_s = workload.arrivals.whole_cycles_s, math.inf
    before_s = whole_cycles_s(EARLIER * float(np.max(turns * gaps_s)))
    most_s = max(MOST_EARLIER / workload.rate, duration_s)
    if before_s > most_s:
        before_s = repeated_s = whole_cycles_s(most_s)
    starts = replace(
        workload,
        adapters=tuple(
            changed(each, rate=each.rate / mean, sessions=None)
            for each, mean in zip(workload.adapters, turns.tolist(), strict=True)
        ),
        sessions=None,
    )
    start_s, owner = draw_times(starts, before_s + duration_s, seed)
    owner = _lengths_of(starts, owner, len(start_s), seed).adapter
    count = generator(seed, 5).geometric(1.0 / turns[owner])
    ends = np.cumsum(count)
    session, total = np.repeat(np.arange(len(count)), count), int(count.sum())
    turn = np.arange(total) - np.repeat(ends - count, count)
    # The second half of `_turn_lengths` has the lengths of later turns.
    marks = _marks(starts, _turn_lengths(workload), owner[session] + len(turns) * (turn > 0), seed)

    def summed(values: npt.NDArray[Any]) -> Any:
        """Sum over the turns of a session up to each turn."""
        sums = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
        return sums[1:] - sums[(ends - count)[session]]

    adapter = owner[session]
    thought_s = np.array([0.0 if each is None else each.think_s for each in own])[adapter]
    wait_s = FIRST_TOKEN_S + PER_TOKEN_S * marks.output_tokens
    wait_s += thought_s * generator(seed, 6).standard_exponential(total)
    # A turn comes after the waits of all turns before it; its prompt has their prompts and outputs.
    time_s = start_s[session] - before_s + summed(wait_s) - wait_s
    # Turns in the run of a repetition, which is a session of its own.
    lap = np.where(start_s[session] < before_s, np.maximum(time_s // repeated_s, 0.0), 0.0).astype(np.int64)
    time_s -= lap * before_s
    prompt = summed(marks.input_tokens + marks.output_tokens) - marks.output_tokens
    # A session ends before the turn whose prompt would be too long.
    here = (time_s >= 0.0) & (time_s < duration_s) & (prompt <= MAX_TOKENS)
    rows = np.flatnonzero(here)[np.argsort(time_s[here], kind="stable")]
    full = (prompt + marks.output_tokens) // BLOCK_TOKENS
    longest = np.maximum.reduceat(full, ends - count) if total else full
    shared = np.minimum(workload.shared_prefix_tokens[owner], marks.input_tokens[ends - count] - 1) // BLOCK_TOKENS
    of, lap = session[rows], lap[rows]
    first = (np.cumsum(longest) - longest)[of] + lap * longest.sum()
    blocks = chained(adapter[rows], shared[of], full[rows], first, BLOCK_TOKENS)
    return RequestTrace(
        time_s[rows], adapter[rows], prompt[rows], marks.output_tokens[rows], blocks=blocks, end_s=duration_s,
        sessions=of + lap * len(count),
    )  # fmt: skip


def _turn_lengths(workload: Workload) -> list[list[Lengths]]:
    """Return the lengths of added input and of outputs: of the first turn of each adapter, then of its later turns."""
    added = []
    for adapter, own in zip(workload.adapters, workload.sessions_by_adapter, strict=True):
        first = adapter.input_tokens or workload.input_tokens
        prefix = adapter.shared_prefix_tokens
        added.append(first if own is None else first.scaled(own.added_tokens(first.expected, prefix)))
    sides = [own_lengths(workload, side) for side in SIDES]
    return [sides[0] + added, sides[1] + sides[1]]
