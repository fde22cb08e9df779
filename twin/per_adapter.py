"""What each adapter got in a simulation: counts, latencies, and the share of its requests within limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from packer.arrays import BoolArray, FloatArray, IntArray
from packer.goal import STATISTICS
from packer.io.frames import pl
from packer.twin.per_server import mean, quantiles
from packer.twin.quantiles import by_group

if TYPE_CHECKING:
    from packer.twin.run import Run
    from packer.workload import Workload


FEW_REQUESTS = 60  # With fewer completed requests than this, an adapter's 95th percentile is that of its server.
FEW_MAY_REACH = 2.0  # The p95 of few requests is nearly their largest: it breaks a limit beyond this multiple.

MEAN_FROM = 5  # Number of completed requests from which the mean of an adapter with few requests is more than chance.
FEW_CHANCE = 0.05
"""Expected number of adapters with few requests that may be beyond `FEW_MAY_REACH` times their limit in an hour of a
server: which adapter has a request while the server is slow is chance."""

IN_VAIN = 0.05  # With a larger share of its requests waiting in vain, an adapter's 95th percentile is not known.


def quiet_adapters(fleet: Workload) -> str:
    """Return in words how many adapters send too few requests an hour for their own 95th percentile; "" for none."""
    few = int((fleet.rates * 3600.0 < FEW_REQUESTS).sum())
    if not few:
        return ""
    who = "1 adapter sends" if few == 1 else f"{few:,} of {len(fleet):,} adapters send"
    p95 = "its p95 TTFT is that of its server" if few == 1 else "their p95 TTFT is that of their servers"
    return f"{who} fewer than {FEW_REQUESTS} requests an hour: {p95}"


def mean_ttft_ms(sim: Run) -> FloatArray:
    """Mean TTFT of each adapter's completed requests, float64 (m,); NaN where nothing completed."""
    return ratio(sums(sim, sim.ttft_ms), sim.completed_of)


def p95_ttft_ms(sim: Run) -> FloatArray:
    """95th percentile of the TTFT of each adapter's completed requests, float64 (m,); NaN where nothing completed.
    Interpolated linearly between requests, as `numpy.quantile` does."""
    return by_group(sim.ttft_ms, sim.owners, sim.completed_of.astype(np.int64), 0.95)


def mean_itl_ms(sim: Run) -> FloatArray:
    """Mean gap between tokens of each adapter's completed requests, ms, float64 (m,); NaN without a gap."""
    return ratio(*sim.spans_and_gaps)


def spans_and_gaps(sim: Run) -> tuple[FloatArray, FloatArray]:
    """See `Run.spans_and_gaps`."""
    done = sim.raw.finished
    span_ms = (sim.raw.finish_s[done] - sim.raw.first_s[done]) * 1e3
    return sums(sim, span_ms), sums(sim, sim.gaps.astype(np.float64))


def pooled_p95_ttft_ms(sim: Run) -> FloatArray:
    """The 95th percentile of each adapter's TTFT, ms, float64 (m,).

    An adapter with fewer than `FEW_REQUESTS` has no 95th percentile of its own. It gets the percentile of all requests
    of its server, or its own mean if the mean is higher and counts at least `MEAN_FROM` requests. NaN where the server
    does not start, or gives the adapter no answer or too few (`unanswered`). 0 for adapters that sent nothing, or only
    requests that the end of the run cut off.
    """
    if sim.status != "ok":
        return np.full(len(sim.workload), np.nan)
    p95_ms = _completed_p95_ms(sim)
    return np.where(unanswered(sim, p95_ms), np.nan, p95_ms)


def _completed_p95_ms(sim: Run) -> FloatArray:
    """Return `pooled_p95_ttft_ms` by completed requests alone, ms, float64 (m,); 0 without any."""
    number = sim.completed_of
    everyone = sim.ttft_quantiles_ms[1] if number.any() else 0.0
    mean = np.nan_to_num(sim.adapter_mean_ttft_ms, nan=0.0)
    own = np.nan_to_num(sim.adapter_p95_ttft_ms, nan=0.0)
    pooled = np.maximum(np.where(number >= MEAN_FROM, mean, 0.0), np.where(number > 0, everyone, 0.0))
    return np.where(number >= FEW_REQUESTS, own, pooled)


def unanswered(sim: Run, p95_ms: FloatArray) -> BoolArray:
    """Return which adapters get no answer, or too few, bool (m,): more than `IN_VAIN` of all that they sent (without a
    completed request: one) wait for their first token, refused ones apart, for longer than every completed request.

    If the server starves, an adapter's waits are compared with its own completed requests, with fewer than `MEAN_FROM`
    of them with `p95_ms` (`_completed_p95_ms`): those of others may be long.
    """
    raw, m = sim.raw, len(sim.workload)
    longest_ms = np.full(m, sim.ttft_ms.max(initial=0.0))
    if sim.starved:
        own_ms = np.zeros(m)
        np.maximum.at(own_ms, sim.owners, sim.ttft_ms)
        longest_ms = np.where(sim.completed_of >= MEAN_FROM, own_ms, p95_ms)
    waits = np.isnan(raw.first_s) if raw.turned_away is None else np.isnan(raw.first_s) & ~raw.turned_away
    owner = raw.requests.adapter[waits]
    in_vain = (sim.duration_s - raw.requests.time_s[waits]) * 1e3 > longest_ms[owner]
    sent = np.bincount(raw.requests.adapter, minlength=m) + raw.refused if in_vain.any() else 0
    found: BoolArray = np.bincount(owner[in_vain], minlength=m) > IN_VAIN * sent
    return found if sim.completed_of.all() else found | (_waited_ms(sim, "ttft") > longest_ms)


ENOUGH = {"mean": MEAN_FROM, "median": 10, "p90": 30, "p95": FEW_REQUESTS, "p99": 300}
"""Number of completed requests from which a statistic of an adapter says more than that of its server."""


def slo_used(sim: Run) -> FloatArray:
    """Return the share of its limits (`Workload.slo`) that each adapter uses, float64 (m,): above 1 it breaks them.

    Infinite if the server does not start, starves or has a queue that grows. An adapter with fewer than `FEW_REQUESTS`
    may have a 95th percentile of its own up to `FEW_MAY_REACH` times its limit. An adapter with fewer than `MEAN_FROM`
    may have any, and gets the mean ITL of its server, an idle one 0. Other statistics likewise, by `ENOUGH`.
    """
    if sim.status != "ok" or sim.starved or not sim.stable:
        return np.full(len(sim.workload), np.inf)
    goal, used = sim.workload.slo, np.zeros(len(sim.workload))
    for key in goal.keys("adapter"):
        used = np.maximum(used, judged_ms(sim, key) / goal.column(sim.workload, key))
    return used


def judged_ms(sim: Run, key: str) -> FloatArray:
    """Return the figure by which each adapter is judged, ms, float64 (m,): its own, or that of its server. An adapter
    none of whose requests completed is judged by their longest wait so far, once that is beyond its limit."""
    statistic, _, what = key.removesuffix("_ms").partition("_")
    figures = _completed_ms(sim, key, statistic, what)
    if what in ("ttft", "e2e") and not sim.completed_of.all():
        waited_ms = _waited_ms(sim, what)
        figures = np.where(waited_ms > sim.workload.slo.column(sim.workload, key), waited_ms, figures)
    return figures


def _waited_ms(sim: Run, what: str) -> FloatArray:
    """Return the longest wait of each adapter's requests until the run's end, ms, float64 (m,). `what`: "ttft" (for the
    first token) or "e2e". 0 for adapters with a completed request. Refused requests wait for the whole run."""
    raw, end_s, none = sim.raw, sim.duration_s, sim.completed_of == 0
    rows = np.flatnonzero(none[raw.requests.adapter])
    first_s, waited_s = raw.first_s[rows], np.where(none & (raw.refused > 0), end_s, 0.0)
    each_s = np.where(np.isnan(first_s) | (what == "e2e"), end_s, first_s) - raw.requests.time_s[rows]
    if raw.turned_away is not None:
        each_s[raw.turned_away[rows]] = end_s
    np.maximum.at(waited_s, raw.requests.adapter[rows], each_s)
    return waited_s * 1e3


def _completed_ms(sim: Run, key: str, statistic: str, what: str) -> FloatArray:
    """Return the figure of each adapter from completed requests, ms, float64 (m,); 0 without any."""
    if key == "p95_ttft_ms":
        number = sim.completed_of
        few = (number >= MEAN_FROM) & (number < FEW_REQUESTS)
        own_ms = np.where(few, np.nan_to_num(sim.adapter_p95_ttft_ms, nan=0.0) / FEW_MAY_REACH, 0.0)
        return np.maximum(_completed_p95_ms(sim), own_ms)
    if key == "mean_itl_ms":
        span_ms, gaps = (each.sum() for each in sim.spans_and_gaps)  # per token, as those of adapters
        server_ms = span_ms / gaps if gaps else 0.0
        own_ms = np.nan_to_num(sim.adapter_mean_itl_ms, nan=0.0)
        served = (sim.workload.given_rates > 0.0) | (sim.completed_of > 0.0)
        return np.where(sim.completed_of >= MEAN_FROM, own_ms, np.where(served, server_ms, 0.0))
    values, owners = sim.requests_ms(what)
    count = np.bincount(owners, minlength=len(sim.workload))
    if statistic == "mean":
        own = ratio(np.bincount(owners, values, len(count)), count)
    else:
        own = by_group(values, owners, count, STATISTICS[statistic])
    own = np.nan_to_num(own, nan=0.0)
    everyone = statistic_of(values, statistic) if len(values) else 0.0
    enough = ENOUGH[statistic]
    few_ms = np.where(count >= MEAN_FROM, own / FEW_MAY_REACH, 0.0)
    return np.where(count >= enough, own, np.where(count > 0, np.maximum(few_ms, everyone), 0.0))


def statistic_of(values: FloatArray, name: str) -> float:
    """Return a statistic of some values by its name in the keys of a goal; NaN without values."""
    return mean(values) if name == "mean" else quantiles(np.sort(values), STATISTICS[name])[0]


def server_used(sim: Run) -> float:
    """Return the largest share of the limits of servers (`Workload.slo`) that a server uses; 0 without such limits."""
    if sim.cluster is not None:
        return max(server.server_slo_used for server in sim.servers)
    goal = sim.workload.slo
    limits = goal.limits.to_dict()
    figures = {key: sim.figure(key.removeprefix("server.")) for key in goal.keys("server")}
    return max((figure / limits[key] for key, figure in figures.items() if figure == figure), default=0.0)


def requests_used(sim: Run) -> float:
    """Share of requests beyond limits of requests / the share that may be beyond them (1 - `Goal.request_share`)."""
    goal = sim.workload.slo
    if not goal.keys("request") or not sim.slo_attainment < 1.0:
        return 0.0
    allowed = 1.0 - goal.request_share
    return (1.0 - sim.slo_attainment) / allowed if allowed > 0.0 else float("inf")


def few_used(sim: Run, least: float = 0.0) -> float:
    """Return the share of `FEW_MAY_REACH` times their limits that adapters with few requests use over hours like this.

    Which adapter has a request while the server is slow is chance: requests of each adapter are taken as drawn from all
    requests of the server. Above 1, more than `FEW_CHANCE` adapters on average have a 95th percentile, interpolated as
    `numpy.quantile` does, beyond `FEW_MAY_REACH` times their limit. 0 if no request waits so long.
    Never less than `least`.
    """
    number = sim.completed_of.astype(np.int64)
    few = (number >= MEAN_FROM) & (number < FEW_REQUESTS)
    limits = sim.workload.slo.column(sim.workload, "p95_ttft_ms")[few] * FEW_MAY_REACH
    if not few.any() or sim.sorted_ttft_ms[-1] <= limits.min():
        return least
    # With a tenth of all waits beyond its levels one adapter alone exceeds `FEW_CHANCE`: shorter waits do not matter.
    n = len(sim.ttft_ms)
    usual, waits = float(sim.sorted_ttft_ms[[(n - 1) // 2, n // 2]].mean()), sim.sorted_ttft_ms[9 * n // 10 :]
    (number, limits), times = np.unique(np.array([number[few], limits]), axis=1, return_counts=True)
    place = 0.95 * (number - 1)
    part, above = np.maximum(place % 1.0, 1e-9), number - 1 - np.floor(place)

    def expected(used: float) -> float:
        """Adapters expected beyond: by the upper of the two requests around the percentile alone, or by both."""
        levels = used * limits
        both, upper = (
            (len(waits) - np.searchsorted(waits, each, side="right")) / n
            for each in (levels, usual + (levels - usual) / part)
        )
        beyond = np.maximum(_more_than(above, number, both), _more_than(above - 1, number, upper))
        return float(beyond @ times)

    low, high = 0.0, float(waits[-1] / limits.min())
    while high > least and high - low > 0.01 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if expected(middle) > FEW_CHANCE else (low, middle)
    return max(least, high)


def _more_than(k: FloatArray, n: IntArray, p: FloatArray) -> FloatArray:
    """Return the chance that more than k >= -1 of n < `FEW_REQUESTS` events of chance p each occur, float64 as n."""
    p = np.minimum(p, 1.0 - 1e-5)  # the odds of a certain event are infinite
    j = np.arange(1, int(k.max(initial=0)) + 1)[:, np.newaxis]
    none = (1.0 - p) ** n
    chances = np.cumprod(np.maximum(n - j + 1, 0) / j * (p / (1.0 - p)), axis=0) * none
    at_most = none + np.where(j <= k, chances, 0.0).sum(axis=0)
    return np.where(k < 0, 1.0, 1.0 - np.minimum(at_most, 1.0))


def kept_requests(sim: Run) -> tuple[BoolArray, BoolArray]:
    """Return which requests kept their limits (`Goal.of_requests`), and which broke them, bool (n,) each.

    A request breaks a limit if it would exceed it even if all its remaining tokens came at the end of the run; the
    limit of its mean gap between tokens only once it completed. A refused request with a row breaks its limits. A
    completed request that breaks no limit keeps them. Others, which the end of the run cut off, do neither. Limits of
    gaps do not apply to requests of one token.
    """
    raw, requests, end_s = sim.raw, sim.raw.requests, sim.duration_s
    first_s, finish_s = (np.where(np.isnan(at_s), end_s, at_s) for at_s in (raw.first_s, raw.finish_s))
    gaps = np.maximum(requests.output_tokens - 1, 1)
    broke: BoolArray = np.zeros(len(requests), dtype=np.bool_)
    for what, column in sim.workload.slo.of_requests(sim.workload).items():
        same = len(column) > 0 and bool((column == column[0]).all())
        limit_ms = column[0] if same else column[requests.adapter]
        if what == "itl":
            with np.errstate(invalid="ignore"):
                broke |= raw.finished & ((raw.finish_s - raw.first_s) * 1e3 > limit_ms * gaps)
            continue
        spans = {"ttft": (requests.time_s, first_s), "tpot": (first_s, finish_s)}
        since_s, until_s = spans.get(what, (requests.time_s, finish_s))
        per = {"tpot": gaps, "normalised": requests.output_tokens}.get(what, 1)
        took_ms: FloatArray = (until_s - since_s) * 1e3 / per
        broke |= took_ms > limit_ms
    if raw.turned_away is not None:
        broke |= raw.turned_away
    return raw.finished & ~broke, broke


def late(sim: Run) -> FloatArray:
    """See `Run.late`."""
    beyond = sim.ttft_ms > sim.workload.slo.columns(sim.workload)[0][sim.owners]
    return np.array([sim.raw.requests.time_s[sim.raw.finished][beyond], sim.ttft_ms[beyond]])


def slo_counts(sim: Run) -> tuple[FloatArray, FloatArray]:
    """Requests of each adapter that kept its limits, and that kept or broke them; refused ones broke them."""
    m = len(sim.workload)
    kept, broke = sim.kept_requests
    owner = sim.raw.requests.adapter
    number = np.bincount(owner[kept], minlength=m).astype(np.float64)
    return number, number + np.bincount(owner[broke], minlength=m) + sim.raw.refused


def per_adapter_frame(sim: Run) -> pl.DataFrame:
    """See `Run.per_adapter`."""
    m, raw = len(sim.workload), sim.raw
    sent = np.bincount(raw.requests.adapter, minlength=m) + raw.refused
    tokens = {side: sums(sim, getattr(raw.requests, side)[raw.finished]) for side in ("input_tokens", "output_tokens")}
    many = sim.owners[sim.gaps > 0]
    tpot_ms = ratio(np.bincount(many, sim.tpot_ms, m), np.bincount(many, minlength=m))
    columns: dict[str, Any] = {
        "adapter": list(sim.workload.names),
        "rank": sim.workload.ranks,
        "rate": sim.workload.given_rates,
        "sent": sent.astype(np.int64),
        "completed": sim.completed_of.astype(np.int64),
        **{side: total.astype(np.int64) for side, total in tokens.items()},
        "total_token_throughput": (tokens["input_tokens"] + tokens["output_tokens"]) / sim.duration_s,
        "mean_ttft_ms": sim.adapter_mean_ttft_ms,
        "p95_ttft_ms": sim.adapter_p95_ttft_ms,
        "mean_tpot_ms": tpot_ms,
        "mean_itl_ms": sim.adapter_mean_itl_ms,
        "slo_attainment": sim.adapter_slo_attainment,
    }
    if raw.found is not None:
        columns["prefix_hit_rate"] = sim.adapter_prefix_hit_rate
    return pl.DataFrame(columns).with_columns(pl.col("^.*_ms$|^slo_attainment$|^prefix_hit_rate$").fill_nan(None))


def found(sim: Run) -> tuple[IntArray, IntArray, IntArray]:
    """Return tokens found in the KV cache, prompt and adapter of each admitted request; empty without caching."""
    requests, held = sim.raw.requests, sim.raw.found
    admitted = np.zeros(0, dtype=np.int64) if held is None else np.flatnonzero(held >= 0)
    tokens = admitted if held is None else held[admitted]
    return tokens, requests.input_tokens[admitted], requests.adapter[admitted]


def prefix_hit_rate(sim: Run) -> float:
    """See `Run.prefix_hit_rate`: `vllm:prefix_cache_hits` / `vllm:prefix_cache_queries`. Both leave out requests that
    come back after a preemption."""
    tokens, prompts, _ = found(sim)
    return float(tokens.sum() / prompts.sum()) if len(tokens) else float("nan")


def prefix_hit_rates(sim: Run) -> FloatArray:
    """See `Run.adapter_prefix_hit_rate`."""
    tokens, prompts, owners = found(sim)
    m = len(sim.workload)
    return ratio(np.bincount(owners, tokens, m), np.bincount(owners, prompts, m))


def sums(sim: Run, weights: npt.ArrayLike | None = None) -> FloatArray:
    """Return sums over each adapter's completed requests, float64 (m,); without weights their number."""
    return np.bincount(sim.owners, weights, minlength=len(sim.workload)).astype(np.float64)


def ratio(total: npt.NDArray[Any], number: npt.NDArray[Any]) -> FloatArray:
    """total / number, NaN where the number is 0."""
    out = np.full(len(total), np.nan)
    np.divide(total, number, out=out, where=number > 0)
    return out


def draft_acceptance(sim: Run) -> float:
    """See `Run.draft_acceptance`."""
    drafts = sim.raw.drafts
    return drafts.kept / drafts.tried if drafts is not None and drafts.tried else math.nan


def draft_acceptance_needed(sim: Run) -> float:
    """See `Run.draft_acceptance_needed`. Without drafts the same steps would take less time and bring each request one
    token: if drafts and verification take a share m of the time of steps with decodes, a request must keep m / (1 - m)
    drafts per step."""
    drafts = sim.raw.drafts
    if drafts is None or not drafts.tried or drafts.more_s >= drafts.decode_s:
        return math.nan
    return drafts.more_s / (drafts.decode_s - drafts.more_s) * drafts.steps / drafts.tried
