"""Whether a server keeps up: how much of what was sent it completed ("starved"), and whether its queue grows.

"Served at least 0.9 of what was sent" passes servers whose queue grows all the time: how long their requests wait then
depends only on the length of the run. A server is stable if its queue does not grow: the mean number of waiting
requests over the last third of a run is compared with that over the middle third (the first third fills the server).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from packer.arrival import RequestTrace
    from packer.profile import Profile
    from packer.twin.run import Run
    from packer.workload import Workload

SHORT_S = 300.0  # Of a shorter run, the requests that are under way at the end are a large share.
UNDER_WAY = 0.05
"""Share of the tokens sent that may be those of requests that run at the end: half of what a server that does not
starve may leave unserved."""
MOSTLY_FREE = 1.0 / 3.0  # Largest mean share of the KV cache in use of a server that is surely not overloaded.
PART = 0.25  # Largest share of a run for which requests last, of one that shows whether a server is overloaded.
SETTLING_S = 1.0
SLOW_TOKEN_MS = 100.0
"""Time that a request needs before a trace's end to count: its prefill, s, and each token if no TPOT is known, ms."""


def served_share(sim: Run) -> float:
    """Tokens completed / tokens sent in one simulation, in [0, 1]; 1 when nothing was sent.

    The requests drawn in one run vary by several percent in number and length, which says nothing about the server. So
    the share is of what was sent, not of the nominal load. In a replayed trace, a run of less than `SHORT_S`, or one at
    whose end more than `UNDER_WAY` of the tokens are those of requests that had no time to end, as where requests are
    few or long, only requests count that could have been completed by its end, and those that were refused. Requests
    that last for much of an hour fill a server that begins empty for just as long, so that hours of a server that is
    overloaded look alike: its KV cache must be `MOSTLY_FREE`, and its requests last for at most `PART` of the run.
    """
    if sim.status != "ok":
        return 0.0
    if sim.closed_loop:  # open requests at the end are no backlog
        return 1.0
    if (sim.workload.arrivals.trace is not None or sim.duration_s < SHORT_S) and not sim.paced:
        return served_of_due(sim)
    if not sim.sent_tokens:
        return 1.0
    share = min(sim.total_token_throughput * sim.duration_s / sim.sent_tokens, 1.0)  # but for rounding
    if share < 1.0 - UNDER_WAY and not sim.paced and sim.mean_kv_usage < MOSTLY_FREE:
        requests, finished, end_s = _served(sim)
        tokens, needed_s = _tokens(requests), _needed_s(requests, sim.mean_tpot_ms)
        early = ~finished & (requests.time_s + needed_s > end_s)
        seen = float(tokens @ needed_s) <= PART * end_s * float(tokens.sum())
        if seen and float(tokens[early].sum()) > UNDER_WAY * sim.sent_tokens:
            return served_of_due(sim)
    return share


def served_of_due(sim: Run) -> float:
    """Tokens completed / tokens due in one simulation, in [0, 1]: without requests still in flight at its end."""
    requests, finished, end_s = _served(sim)
    refused = sim.sent_tokens - float(_tokens(requests).sum())
    return due_share(requests, finished, end_s, sim.mean_tpot_ms, refused)


def _served(sim: Run) -> tuple[RequestTrace, BoolArray, float]:
    """The requests that were not refused, whether each completed, and until when they could, s."""
    requests, finished = sim.raw.requests, sim.raw.finished
    if sim.refused and sim.raw.turned_away is not None:
        requests, finished = requests.take(~sim.raw.turned_away), finished[~sim.raw.turned_away]
    return requests, finished, sim.duration_s - 2e-3 * (sim.cluster.network_ms if sim.cluster else 0.0)


def _tokens(requests: RequestTrace) -> IntArray:
    return requests.input_tokens + requests.output_tokens


def _needed_s(requests: RequestTrace, mean_tpot_ms: float) -> FloatArray:
    """The time that requests need for their output once they run, s."""
    ms_per_token = mean_tpot_ms if math.isfinite(mean_tpot_ms) else SLOW_TOKEN_MS
    return SETTLING_S + requests.output_tokens.astype(np.float64) * (ms_per_token * 1e-3)


def due_share(
    requests: RequestTrace, finished: BoolArray, duration_s: float, mean_tpot_ms: float,
    refused_tokens: float = 0.0,
) -> float:  # fmt: skip
    """Tokens completed / tokens due, over requests that had enough time for their output once they ran.

    A trace may be short or have few requests; the last ones would always count as unserved. The time that a request
    needs is taken from the run itself, without the time in the queue.

    `requests`, `finished`: n requests, and bool (n,) whether each completed within `duration_s`. `mean_tpot_ms`: NaN if
    no request of the run has one. `refused_tokens`: due tokens of requests that are not among `requests`.
    """
    tokens, due = _tokens(requests), requests.time_s + _needed_s(requests, mean_tpot_ms) <= duration_s
    total = float(tokens[due].sum()) + refused_tokens
    return float(tokens[due & finished].sum()) / total if total else 1.0


BATCHES = 12  # Number of pieces of a third: the spread of their means shows how far chance moves the mean of the third.
FEW = 2.0  # Largest number of waiting requests that is not a queue.
MATERIAL = 0.1
"""Growth from the middle third to the last, relative to the middle: a queue that grows steadily from an empty
server grows by two thirds."""

T_GROWS = 2.5  # Growth, in standard errors, beyond chance.
MAX_CORRELATION = 0.9
STEADY = 0.2
"""Growth relative to the middle third that must be excluded for a server to be clearly stable: a queue that grows
steadily has 0.67; a queue that drifts at random, at a load of exactly 1, has 0.29."""

SLOW = 0.0025  # Growth or queue, as a share of the requests sent, too small to matter: 9 s of wait in an hour.

SEEDS = 5
T_CLEAR = 2.78  # One-sided 2.5 % point of Student's t with `SEEDS` - 1 degrees of freedom.
LONGEST_S = 4 * 3600.0


def waiting_means(sim: Run, edges_s: FloatArray) -> FloatArray:
    """Return the mean number of requests that wait for their first token in each piece of a run, float64 (k,).
    `edges_s` float64 (k + 1,): ascending ends of the pieces, within the run. A preempted request does not count again.
    0 if the server does not start."""
    started = np.sort(sim.raw.first_s[np.isfinite(sim.raw.first_s)], kind="stable")  # nearly sorted: fast
    sent_s = np.sort(sim.raw.requests.time_s, kind="stable")
    return np.diff(_time_since(sent_s, edges_s) - _time_since(started, edges_s)) / np.diff(edges_s)


def _time_since(events_s: FloatArray, at_s: FloatArray) -> FloatArray:
    """Σ (t − event) over the events up to t, for each t: the integral of their count. Events are sorted."""
    count = np.searchsorted(events_s, at_s)
    total = np.concatenate([[0.0], np.cumsum(events_s)])
    integral: FloatArray = count * at_s - total[count]
    return integral


def fewest_waiting(sim: Run, *edges_s: float) -> list[int]:
    """Smallest number of requests that wait for their first token at any time of each piece between the edges."""
    started = np.sort(sim.raw.first_s[np.isfinite(sim.raw.first_s)], kind="stable")
    places = np.searchsorted(started, edges_s, side="right").tolist()
    arrived, found = np.sort(sim.raw.requests.time_s, kind="stable"), []
    for start_s, before, until in zip(edges_s, places, places[1:], strict=False):
        at_s = np.concatenate([[start_s], started[before:until]])  # the count falls when a request starts
        sent = np.searchsorted(arrived, at_s, side="right")
        found.append(int((sent - np.arange(before, before + len(at_s))).min()))
    return found


@dataclass(frozen=True, slots=True)
class QueueGrowth:
    """Mean waiting requests of the middle and of the last third, and the difference in standard errors."""

    middle: float
    last: float
    statistic: float

    @property
    def material(self) -> bool:
        """Whether the growth is large enough to matter, regardless of chance."""
        return self.last > FEW and self.last - self.middle > max(1.0, MATERIAL * self.middle)


def queue_growth(sim: Run) -> QueueGrowth:
    """Growth of the queue in one run. The standard error is computed from the means of `BATCHES` pieces around the
    common straight line. The correlation of each piece with the next one widens it: var · (1 + ρ) / (1 − ρ), ρ at most
    `MAX_CORRELATION`."""
    means = waiting_means(sim, np.linspace(sim.duration_s / 3.0, sim.duration_s, 2 * BATCHES + 1))
    middle, last = float(means[:BATCHES].mean()), float(means[BATCHES:].mean())
    place = np.arange(2 * BATCHES) - (BATCHES - 0.5)
    rest = means - means.mean() - place * float(place @ means) / float(place @ place)
    variance = float(rest @ rest) / (2 * BATCHES - 2)
    if variance <= 0.0:
        return QueueGrowth(middle, last, math.inf if last > middle else 0.0)
    rho = min(max(float(rest[1:] @ rest[:-1]) / float(rest @ rest), 0.0), MAX_CORRELATION)
    # A difference of two means of `BATCHES` pieces has twice the variance of one.
    error = math.sqrt(2.0 * variance / BATCHES * (1.0 + rho) / (1.0 - rho))
    return QueueGrowth(middle, last, (last - middle) / error)


def is_stable(sim: Run) -> bool:
    """Whether the queue of one run does not grow, as far as this run shows; False if the server does not start.

    Requests refused or held back are a queue that outgrew its client. If the rate of requests changes with time
    (traces, piecewise rates, bursts), thirds differ because of the load. Such a server is stable if its queue gets as
    short in the last third as in the middle one, and nearly empty: a queue that stays long after a burst only stops
    growing because the burst is over.
    """
    at_most = FEW + SLOW * sim.sent if sim.paced else 0.0
    if sim.status != "ok" or sim.refused + sim.held_back > at_most:
        return False
    if sim.closed_loop:
        return True
    if sim.workload.arrivals.kind not in ("poisson", "lognormal"):
        third = sim.duration_s / 3.0
        (last,) = fewest_waiting(sim, 2 * third, sim.duration_s)
        if last <= FEW:
            return True
        (middle,) = fewest_waiting(sim, third, 2 * third)
        return last <= FEW + min((1.0 + MATERIAL) * middle, SLOW * len(sim.raw.requests.time_s))
    if _waiting_at_last(sim) <= FEW:
        return True
    growth = queue_growth(sim)
    return not (growth.material and growth.statistic > T_GROWS)


def _waiting_at_last(sim: Run) -> float:
    """Mean number of requests that wait for their first token in the last third, raised slightly against rounding."""
    start_s, end_s = sim.duration_s * 2.0 / 3.0, sim.duration_s
    # Negated, so that requests without a first token (NaN) are among them.
    late = np.flatnonzero(~(sim.raw.first_s <= start_s))
    first_s = sim.raw.first_s[late]
    first_s = np.where(np.isnan(first_s), end_s, first_s)
    waited_s = np.clip(first_s, start_s, end_s) - np.clip(sim.raw.requests.time_s[late], start_s, end_s)
    return float(waited_s.sum()) / (end_s - start_s) * (1.0 + 1e-9)


@dataclass(frozen=True, slots=True)
class Stability:
    """Whether a server is stable, whether that is clear, and how many waiting requests are added per second."""

    stable: bool
    clear: bool
    growth_req_s: float


def stability(
    workload: Workload, profile: Profile, *, duration_s: float | None = None, seed: int = 0, **server: Any
) -> Stability:
    """Simulate a server until it is clear whether it is stable.

    One run suffices for servers without a queue and for those whose queue grows far beyond chance. Otherwise the
    growths of `SEEDS` runs with seeds `seed`, `seed` + 1, … are compared (Student's t: runs are independent, whatever
    the correlation within them). The runs get twice as long until the result is clear, up to `LONGEST_S` (or
    `duration_s`); an unclear result counts as unstable. A replayed trace cannot be lengthened: its one run decides.

    `workload`, `profile`, `server`: as in `packer.twin.simulate.simulate`. `duration_s`: of the first run; None as
    there.
    """
    from packer.twin.simulate import simulate

    first = simulate(workload, profile, duration_s=duration_s, seed=seed, **server)
    span_s, growth = first.duration_s, queue_growth(first)
    # The middles of two thirds are a third of the run apart.
    slope = 3.0 * (growth.last - growth.middle) / span_s
    no_queue = first.refused + first.held_back > 0 or growth.last <= FEW
    obvious = growth.material and growth.statistic > 2 * T_GROWS
    if no_queue or obvious or workload.arrivals.kind not in ("poisson", "lognormal"):
        return Stability(is_stable(first), True, slope)
    runs = [first]
    while True:
        runs += [
            simulate(workload, profile, duration_s=span_s, seed=seed + k, **server) for k in range(len(runs), SEEDS)
        ]
        growths = [queue_growth(run) for run in runs]
        rises = np.array([each.last - each.middle for each in growths])
        middle = float(np.mean([each.middle for each in growths]))
        error = float(rises.std(ddof=1)) / math.sqrt(SEEDS)
        rise, slow = float(rises.mean()), SLOW * first.sent * span_s / first.duration_s / 3.0
        refused = any(run.refused + run.held_back for run in runs)
        if refused or (rise > T_CLEAR * error and rise > max(slow, MATERIAL * middle)):
            return Stability(False, True, 3.0 * rise / span_s)
        if rise + T_CLEAR * error < max(slow, STEADY * middle, FEW):
            return Stability(True, True, 3.0 * rise / span_s)
        if 2.0 * span_s > max(LONGEST_S, first.duration_s):
            return Stability(False, False, 3.0 * rise / span_s)
        span_s, runs = 2.0 * span_s, []
