"""A day of Azure's conversation traffic: the schedule against a static plan, hindsight and an autoscaler.

    uv run python benchmarks/fleets/day.py TRACE.csv.gz

The trace of November 2023 lasts an hour; its lengths and its rate are taken, requests are given to adapters by a power
law, and the rates follow a working day in three time zones. The day is replayed at six times its speed (periods of 10
minutes), so that starting servers weighs six times as much as it would.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from autoscaler import reactive

import packer
from packer.objectives.headroom import with_rates
from packer.operate.replay import Day, Window, replay, requests_of_day, windows_of
from packer.operate.schedule import schedule
from packer.testing.records import record_text
from packer.traces.assign import assign_adapters
from packer.traces.measure import measure_workload
from packer.traces.read import read_trace

HERE = Path(__file__).resolve().parent
PERIOD_S = 600.0
ADAPTERS = 60
SCALE = 5.0
"""Times the trace's rate, at the peak."""


def rates_of_day(base: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
    """Rates by hour: a working day between a night of 15 % and its peak, in three time zones 4 h apart."""
    zone = 4.0 * (np.arange(len(base)) % 3)
    found = {}
    for hour in range(24):
        local = (hour - zone) % 24.0
        work = np.exp(-0.5 * ((local - 13.5) / 3.2) ** 2)
        found[f"{hour:02d}"] = base * SCALE * (0.15 + 0.85 * work)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Plan the day, replay it, write day.json and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=Path)
    parser.add_argument("--profile", default=packer.load_profile("h100-64gb/llama-3.1-8b-instruct").name)
    options = parser.parse_args(argv)
    profile = packer.load_profile(options.profile)
    trace = assign_adapters(read_trace(options.trace), ADAPTERS, ranks=(8, 16, 32), seed=1)
    fleet = measure_workload(trace).with_arrivals(packer.Arrivals())
    rates = rates_of_day(fleet.rates)
    started = time.perf_counter()
    found = schedule(fleet, profile, rates, trends={}, period_s=PERIOD_S)
    planned_s = time.perf_counter() - started
    requests = requests_of_day(fleet, rates, PERIOD_S, seed=11)
    end_s = PERIOD_S * len(rates)
    best, hindsight_moves = hindsight(fleet, profile, rates)
    loads = [item.offered_tok_s(found.static.workload) for item in found.static.bins]
    most = max(item.max_loras for item in found.static.bins)
    server = packer.Cluster.of(profile, 1, max_loras=most, max_lora_rank=32)
    given: dict[str, Any] = {"seed": 3}
    days = {
        "static plan": replay(fleet, requests, [Window(0.0, end_s, found.static.cluster())], **given),
        "schedule": replay(fleet, requests, windows_of(found), startup_s=found.startup_s, moves=found.moves, **given),
        "hindsight, each hour alone": replay(fleet, requests, best, moves=hindsight_moves, **given),
    }
    for target in (0.8, 0.65):
        windows = reactive(requests, server, max(loads), startup_s=found.startup_s, target=target)
        name = f"autoscaler, {target:.0%} of capacity"
        days[name] = replay(fleet, requests, windows, startup_s=found.startup_s, **given)
    result = {
        "planned_s": planned_s,
        "adapters": len(fleet),
        "requests": len(requests),
        "static_gpus": found.static.n_gpus,
        "periods": [each.gpus for each in found.periods],
        "days": {name: day.to_dict() for name, day in days.items()},
    }
    (HERE / "day.json").write_text(record_text(result) + "\n", "utf-8")
    print(table(days))


def hindsight(
    fleet: packer.Workload, profile: packer.Profile, rates: Mapping[str, npt.NDArray[np.float64]]
) -> tuple[list[Window], int]:
    """The fewest GPUs of each period alone, and how many adapters they would move."""
    windows, moves = [], 0
    before: dict[str, int] = {}
    for k, vector in enumerate(rates.values()):
        plan = packer.recommend(with_rates(fleet, vector), profile, seed=5)
        home = {fleet.names[i]: s for s, item in enumerate(plan.bins) for i in item.adapters}
        moves += sum(before.get(name, s) != s for name, s in home.items())
        before = home
        windows.append(Window(k * PERIOD_S, (k + 1) * PERIOD_S, plan.cluster()))
    return windows, moves


def table(days: Mapping[str, Day]) -> str:
    """GPU-hours, starts, moves and latency, as Markdown."""
    lines = [
        "| servers | GPU-hours | starts | moves | TTFT p95 | within 2 s and 100 ms ITL |",
        "|---|---|---|---|---|---|",
    ]
    for name, day in days.items():
        row = day.to_dict()
        p95 = "–" if row["p95_ttft_ms"] is None else f"{row['p95_ttft_ms'] / 1000:.2f} s"
        lines.append(f"| {name} | {day.gpu_hours:.1f} | {day.starts} | {day.moves} | {p95} | {day.within:.2%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
