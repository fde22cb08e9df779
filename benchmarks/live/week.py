"""A week of Azure's conversation traffic on the cluster twin, one failure a day: the controller beside other ways.

    uv run python benchmarks/live/week.py ../shared/data/traces/azure_llm_2023_conv.csv.gz

The trace of November 2023 lasts an hour; its lengths and its rate are taken, requests are given to 200 adapters by a
power law, and the rates follow a working week: a working day in three time zones, weekends at 60 %, and on each day
each adapter's rate times a log-normal factor.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import packer
from packer.checks import slot_rank_for
from packer.cluster import ServerKind
from packer.objectives.headroom import with_rates
from packer.operate.capacity import Capacity
from packer.operate.rehearse import Rehearsal, rehearse
from packer.operate.replay import requests_of_day
from packer.solvers.candidates import max_loras_candidates
from packer.testing.records import record_text
from packer.traces.assign import assign_adapters
from packer.traces.measure import measure_workload
from packer.traces.read import read_trace

HERE = Path(__file__).resolve().parent
ADAPTERS = 200
GOAL = "ttft_ms=2000,itl_ms=100,request_share=0.995"
PERIOD_S = 600.0
WEEKEND = 0.6
DAILY_SIGMA = 0.3


def rates_of_week(base: np.ndarray, scale: float, days: int, seed: int) -> dict[str, np.ndarray]:
    """Rates by period."""
    rng = np.random.default_rng(seed)
    zone = 4.0 * (np.arange(len(base)) % 3)
    found = {}
    for day in range(days):
        factor = rng.lognormal(-0.5 * DAILY_SIGMA**2, DAILY_SIGMA, len(base)) * (WEEKEND if day % 7 > 4 else 1.0)
        for hour in np.arange(0.0, 24.0, PERIOD_S / 3600.0):
            work = np.exp(-0.5 * (((hour - zone) % 24.0 - 13.5) / 3.2) ** 2)
            found[f"{day} {hour:.3f}"] = base * scale * factor * (0.15 + 0.85 * work)
    return found


def plan_before(fleet: packer.Workload, profile: packer.Profile, rates: dict[str, np.ndarray]) -> packer.Plan:
    """The plan that runs when the week begins: for its first hour, on servers that can take over any adapter."""
    first = with_rates(fleet, next(iter(rates.values())))
    plan = packer.solve(first, profile, slo=fleet.slo, max_replicas=4, with_headroom=False)
    return uniform(plan, fleet)


def uniform(plan: packer.Plan, fleet: packer.Workload, seed: int = 0) -> packer.Plan:
    """The plan with one kind of server, which can take any adapter: its slots hold most of the fleet's mix."""
    item, most, found = plan.bins[0], 0.0, plan.bins[0].settings
    rank, load = (slot_rank_for(int(fleet.ranks.max())), dict(enumerate(fleet.offered_tok_s_by_adapter.tolist())))
    slots = max_loras_candidates(len(fleet), item.profile, rank)
    capacity = Capacity(fleet, [ServerKind(f"{n} slots", item.profile, n, rank) for n in slots], seed)
    for s, n in enumerate(slots):
        if (held := capacity.of(s, load)) > most:
            most, found = held, item.profile.settings(n, rank)
    return replace(plan, bins=tuple(replace(each, settings=found) for each in plan.bins))


def main() -> None:
    """Rehearse, write week.json and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--profile", default="h100-64gb/llama-3.1-8b-instruct")
    parser.add_argument("--scale", type=float, default=6.0)
    parser.add_argument("--days", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="only the controller and hindsight")
    options = parser.parse_args()
    profile = packer.load_profile(options.profile)
    trace = assign_adapters(read_trace(options.trace), ADAPTERS, ranks=(8, 16, 32), seed=1)
    fleet = measure_workload(trace).with_arrivals(packer.Arrivals())
    fleet = replace(fleet, slo=fleet.slo.changed_by(packer.Goal.parse(GOAL)))
    rates = rates_of_week(fleet.rates, options.scale, options.days, options.seed)
    requests = requests_of_day(fleet, rates, PERIOD_S, seed=11 + options.seed)
    plan = plan_before(fleet, profile, rates)
    before = time.process_time()
    started = time.perf_counter()

    def say(what: str, _done: int, _total: int) -> None:
        print(f"{time.process_time() - before:6.1f} s {what}", flush=True)

    week = fleet.with_arrivals(packer.Arrivals("trace", trace=requests))
    found = rehearse(plan, week, servers=8, seed=options.seed, beside=not options.alone, progress=say)
    took = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - before}
    took["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result = {"requests": len(requests), "adapters": len(fleet), **took, **found.to_dict()}
    if not options.alone and options.days == 7:
        (HERE / "week.json").write_text(record_text(result) + "\n", "utf-8")
    print(f"{len(requests):,} requests, {took}")
    print(table(found))


def table(found: Rehearsal) -> str:
    """As Markdown."""
    lines = [
        "| servers | GPU-hours | beside hindsight | within limits | starts | loads |",
        "|---|---|---|---|---|---|",
    ]
    for each in found.outcomes:
        more = each.gpu_hours / found.hindsight_gpu_hours - 1.0
        lines.append(
            f"| {each.name} | {each.gpu_hours:.0f} | {more:+.1%} | {each.within:.2%} | {each.starts} | {each.loads} |"
        )
    lines.append(f"| hindsight | {found.hindsight_gpu_hours:.0f} | | | | {found.fewest_loads} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
