"""What each adapter got in a simulation: counts, latencies, and the share of its requests within limits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

    from packer.twin.result import Simulation

FloatArray = npt.NDArray[np.float64]


def mean_ttft_ms(sim: Simulation) -> FloatArray:
    """Mean TTFT of each adapter's completed requests, float64 (m,); NaN where nothing completed."""
    return _ratio(_sums(sim, sim.ttft_ms), _sums(sim, None))


def quantile_ttft_ms(sim: Simulation, q: float) -> FloatArray:
    """Quantile `q` of the TTFT of each adapter's completed requests, float64 (m,); NaN where nothing completed.

    Interpolated linearly between requests, as `numpy.quantile` does.
    """
    out = np.full(len(sim.workload), np.nan)
    owner = _owners(sim)
    order = np.lexsort((sim.ttft_ms, owner))
    values = sim.ttft_ms[order]
    number = np.bincount(owner, minlength=len(out))
    some = np.flatnonzero(number)
    start = (np.cumsum(number) - number)[some]
    place = q * (number[some] - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, number[some] - 1)
    out[some] = values[start + below] + (place - below) * (values[start + above] - values[start + below])
    return out


def mean_itl_ms(sim: Simulation) -> FloatArray:
    """Mean gap between tokens over the tokens of each adapter's completed requests, ms, float64 (m,).

    NaN where no request with two tokens completed.
    """
    if sim.raw is None:
        return np.full(len(sim.workload), np.nan)
    done = sim.raw.finished
    span_ms = (sim.raw.finish_s[done] - sim.raw.first_s[done]) * 1e3
    return _ratio(_sums(sim, span_ms), _sums(sim, sim.raw.requests.output_tokens[done] - 1.0))


def share_within(sim: Simulation, *, ttft_ms: float = math.inf, itl_ms: float = math.inf) -> FloatArray:
    """Share of each adapter's requests that kept both limits, float64 (m,); NaN where none was decided.

    A request fails if it was refused, its first token came later than `ttft_ms`, has not come although that
    time has passed, or its mean gap between tokens, once it completed, is above `itl_ms`. It keeps the limits
    if it completed without failing. The others, which the end of the run cut off, do not count.
    """
    if sim.raw is None:
        return np.full(len(sim.workload), np.nan)
    raw, requests = sim.raw, sim.raw.requests
    waited_ms = np.where(np.isnan(raw.first_s), sim.duration_s, raw.first_s) - requests.time_s
    failed = waited_ms * 1e3 > ttft_ms
    gaps = np.maximum(requests.output_tokens - 1, 1)
    with np.errstate(invalid="ignore"):
        failed |= raw.finished & ((raw.finish_s - raw.first_s) * 1e3 > itl_ms * gaps)
    m = len(sim.workload)
    kept = np.bincount(requests.adapter[raw.finished & ~failed], minlength=m)
    return _ratio(kept, kept + np.bincount(requests.adapter[failed], minlength=m) + raw.refused)


def per_adapter_frame(sim: Simulation) -> pl.DataFrame:
    """See `Simulation.per_adapter`."""
    import polars as pl

    m, raw = len(sim.workload), sim.raw
    sent: npt.NDArray[Any] = np.zeros(m)
    tpot_ms = np.full(m, np.nan)
    tokens = {side: np.zeros(m) for side in ("input_tokens", "output_tokens")}
    if raw is not None:
        sent = np.bincount(raw.requests.adapter, minlength=m) + raw.refused
        tokens = {side: _sums(sim, getattr(raw.requests, side)[raw.finished]) for side in tokens}
        many = raw.requests.adapter[raw.finished & (raw.requests.output_tokens > 1)]
        tpot_ms = _ratio(np.bincount(many, sim.tpot_ms, m), np.bincount(many, minlength=m))
    columns: dict[str, Any] = {
        "adapter": list(sim.workload.names),
        "rank": sim.workload.ranks,
        "rate": sim.workload.rates,
        "sent": sent.astype(np.int64),
        "completed": _sums(sim, None).astype(np.int64),
        **{side: total.astype(np.int64) for side, total in tokens.items()},
        "total_token_throughput": (tokens["input_tokens"] + tokens["output_tokens"]) / sim.duration_s,
        "mean_ttft_ms": mean_ttft_ms(sim),
        "p95_ttft_ms": quantile_ttft_ms(sim, 0.95),
        "mean_tpot_ms": tpot_ms,
        "mean_itl_ms": mean_itl_ms(sim),
    }
    return pl.DataFrame(columns).with_columns(pl.col("^.*_ms$").fill_nan(None))


def _owners(sim: Simulation) -> npt.NDArray[np.int64]:
    """Adapter of each completed request, int64 (completed,)."""
    return sim.raw.requests.adapter[sim.raw.finished] if sim.raw is not None else np.zeros(0, dtype=np.int64)


def _sums(sim: Simulation, weights: npt.ArrayLike | None) -> FloatArray:
    """Sums over each adapter's completed requests, (m,); without weights their number."""
    return np.bincount(_owners(sim), weights, minlength=len(sim.workload)).astype(np.float64)


def _ratio(total: npt.NDArray[Any], number: npt.NDArray[Any]) -> FloatArray:
    """total / number, NaN where the number is 0."""
    out = np.full(len(total), np.nan)
    np.divide(total, number, out=out, where=number > 0)
    return out
