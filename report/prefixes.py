"""What a plan assumes about shared prefixes of prompts, and what more shared prefixes would change."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from packer.plan import Plan
from packer.traces.prefixes import with_hit_rate
from packer.twin.engine_rules import rules_of
from packer.twin.simulate import simulate

HIT_RATE = 0.5  # Cached share of prompt tokens in the sentence; production has 54 to 62 % (arXiv 2506.02634).
DURATION_S = 900.0


def prefix_words(plan: Plan, *, briefly: bool = False) -> str | None:
    """Say that no shared prefixes are assumed, and what `HIT_RATE` would do to the busiest server that caches them.
    `briefly`: only the first part, without a simulation. None if the fleet has shared prefixes."""
    if shares_prefixes(plan):
        return None
    assumed = "no shared prefixes assumed (columns shared_prefix_tokens and turns give them)"
    if briefly:
        return assumed
    found = prefix_figures(plan) or {}
    if not _caching(plan):
        said = f"{assumed}; a hit rate of {HIT_RATE:.0%} would change nothing, because the servers are simulated"
        return f"{said} without prefix caching (--set prefix-caching=on simulates vLLM's)"
    if "server" not in found:
        return f"{assumed}, so prefix caching saves nothing"
    ttft, itl = found["mean_ttft_ms"], found["mean_itl_ms"]
    return (
        f"{assumed}; with {found['hit_rate']:.0%} of the prompt tokens in the KV cache, server {found['server']}, "
        f"the busiest, would have in its first {DURATION_S / 60:.0f} min a mean TTFT of {ttft['shared']:,.0f} ms "
        f"instead of {ttft['assumed']:,.0f} ms and an ITL of {itl['shared']:.1f} ms instead of {itl['assumed']:.1f} ms"
    )


def prefix_figures(plan: Plan) -> dict[str, Any] | None:
    """The figures of `prefix_words`, for JSON: the assumed hit rate, and figures of a server at another hit rate, with
    the same requests; only the share of their prompts in the cache differs. None if the fleet has shared prefixes."""
    fleet, trace = plan.workload, plan.workload.arrivals.trace
    if shares_prefixes(plan):
        return None
    assumed: dict[str, Any] = {"assumed_hit_rate": 0.0}
    caching = _caching(plan)
    if trace is not None or not caching:
        return assumed
    k = max(caching, key=lambda number: float(plan.evaluations.offered_tok_s[number]))
    item = plan.bins[k]
    own = fleet.subset(item.adapters, item.shares or None)
    given = {**asdict(item.settings), "seed": plan.seed, "duration_s": DURATION_S}
    bare, half = (simulate(each, item.profile, **given) for each in (own, with_hit_rate(own, HIT_RATE)))
    keys = ("mean_ttft_ms", "mean_itl_ms")
    figures = {key: {"assumed": getattr(bare, key), "shared": getattr(half, key)} for key in keys}
    return {**assumed, "hit_rate": half.prefix_hit_rate, "server": k, **figures}


def shares_prefixes(plan: Plan) -> bool:
    """Whether prompts of the fleet are known to share prefixes."""
    trace = plan.workload.arrivals.trace
    recorded = trace is not None and (trace.blocks is not None or trace.sessions is not None)
    return recorded or plan.workload.shares_prefixes


def _caching(plan: Plan) -> list[int]:
    """Indices of the servers that cache prefixes."""
    return [k for k, item in enumerate(plan.bins) if rules_of(item.profile.engine).prefix_caching]
