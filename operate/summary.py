"""Figures that describe a workload."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from packer.arrays import distinct
from packer.workload import Workload


def summary_of(fleet: Workload) -> dict[str, Any]:
    """Figures of a workload, JSON-able; means and spreads of lengths are over requests. Rates and loads are means over
    the cycle of piecewise arrivals. The rate of an idle adapter (`IDLE_RATE`) is 0."""
    ranks, factor = [], fleet.arrivals.mean_factor
    for rank in distinct(fleet.ranks).tolist():
        own, load = fleet.ranks == rank, fleet.offered_tok_s_by_adapter
        sums = {"rate": factor * float(fleet.given_rates[own].sum()), "offered_tok_s": factor * float(load[own].sum())}
        ranks.append({"rank": rank, "adapters": int(own.sum()), **sums})
    busiest = np.sort(fleet.rates)[::-1].tolist()
    each = factor * fleet.given_rates
    return {
        "name": fleet.name,
        "adapters": len(fleet),
        "rate": float(each.sum()),
        "offered_tok_s": factor * fleet.offered_tok_s,
        "ranks": ranks,
        "adapter_rate": {"min": float(each.min()), "median": float(np.median(each)), "max": float(each.max())},
        "share_of_top_5_percent": _top_share(busiest, 0.05),
        "share_of_top_20_percent": _top_share(busiest, 0.2),
        "input_tokens": _mixture(fleet, "input_tokens"),
        "output_tokens": _mixture(fleet, "output_tokens"),
        "length_correlation": fleet.length_correlation,
        "mean_prompt_tokens": float(fleet.rates @ fleet.mean_input_tokens) / fleet.rate,
        "sessions": fleet.has_sessions,
        "arrivals": fleet.arrivals.kind,
        "arrivals_description": fleet.arrivals.description,
    }


def sessions_of(fleet: Workload) -> tuple[float, float]:
    """Means over requests: turns of their session (1 without one), tokens of their adapter's shared prefix."""
    turns = [1.0 if own is None else own.turns for own in fleet.sessions_by_adapter]
    mean = [np.average(values, weights=fleet.rates) for values in (turns, fleet.shared_prefix_tokens)]
    return float(mean[0]), float(mean[1])


def _top_share(sorted_rates: list[float], part: float) -> float:
    return sum(sorted_rates[: math.ceil(part * len(sorted_rates))]) / sum(sorted_rates)


def _mixture(fleet: Workload, key: str) -> dict[str, float]:
    """Mean and cv of the lengths of all requests together."""
    lengths = [getattr(adapter, key) or getattr(fleet, key) for adapter in fleet.adapters]
    share = fleet.rates / fleet.rate
    means = np.array([item.mean for item in lengths])
    seconds = means**2 * (1.0 + np.array([item.cv for item in lengths]) ** 2)
    mean = float(share @ means)
    variance = max(float(share @ seconds) - mean**2, 0.0)
    return {"mean": mean, "cv": math.sqrt(variance) / mean}
