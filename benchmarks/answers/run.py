"""One log, five ways to ask how many GPUs it takes: they must differ by at most one, and none may break when replayed.

The logs: the traces in `../shared/data/traces`, their requests given to adapters by a power law, and six hours of drawn
requests with the lengths of the conversation trace: days with one peak, bursts, a spike, two services, steps of whole
seconds, one hot adapter, hundreds of quiet ones; and one hour in which the rate or the prompts grow.

    uv run python benchmarks/answers/run.py [--write] [NAME …]

The ways: `packer init`, `packer workload from-log` and `packer solve` (its file), `packer solve TRACE`, and the largest
hour of `packer schedule` (that file, with the trace); `packer evaluate --log` says whether the first plan holds. All
ask for the busiest hour, with the bursts of such hours. Each plan then serves the requests of that hour as they were.
Where one breaks, `DRAWS` drawn hours of the fleet that it was made for, as long as the log's, say in how many of them
it does: what the log's length leaves to chance. Beside the ways stand the fewest GPUs that these requests take in
hindsight (`--load replay`), which are fewer where the hour was a quiet one of its kind, and those of the mean rates.
Mooncake's prompts of 15,000 tokens get wider limits: no number of GPUs keeps the usual ones.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.io.workloads import write_workload
from packer.operate.drift import drift, replayed_on
from packer.operate.observe import observe_log, observe_replayed, seen_in_log
from packer.operate.schedule import periods_of_trace, schedule
from packer.operate.view import Named, View
from packer.testing.records import record_text
from packer.traces.assign import Ranks
from packer.traces.measure import measure_workload, rounded
from packer.traces.pattern import busiest_requests, rates_of
from packer.traces.read import read_trace
from packer.traces.trace import Trace
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.verdict import verdict_of

SHARED = Path("../shared/data/traces")
PROFILE = "h100-64gb/llama-3.1-8b-instruct"
HOUR_S, HOURS, DRAWS = 3600.0, 6, 20
RANKS = Ranks(others=(8, 16, 32))
START_S = 1_767_225_600.0


def _file(name: str, adapters: int = 100) -> Callable[[], Trace]:
    return lambda: Named(adapters).of(read_trace(SHARED / name), RANKS)[0]


def _drawn(
    rate: Callable[[Any], Any], *, adapters: int = 60, exponent: float = 1.2, seed: int = 0, step_s: float = 0.0,
    burst_cv: float = 0.0, own_cv: float = 0.0, second: Callable[[Any], Any] | None = None, hours: int = HOURS,
    longer: float = 1.0,
) -> Callable[[], Trace]:  # fmt: skip
    """Hours of requests at `rate` (of the time in h), by minutes; `second`: of a second half of the adapters.

    `burst_cv`, `own_cv`: of the rate in each minute, of all adapters together and of each by itself.
    `longer`: prompts grow evenly by this factor in all.
    """

    def made() -> Trace:
        rng = np.random.default_rng(seed)
        lengths = read_trace(SHARED / "azure_llm_2023_conv.csv.gz")
        minutes = np.arange(hours * 60.0)
        times, owners = [], []
        for part, of_hour in enumerate(filter(None, (rate, second))):
            means = 60.0 * of_hour(minutes / 60.0) * np.ones(len(minutes))
            if burst_cv:
                means = means * rng.gamma(burst_cv**-2, burst_cv**2, len(means))
            share = np.arange(1.0, adapters + 1.0) ** -exponent
            share /= share.sum()
            if own_cv:
                factors = rng.gamma(own_cv**-2, own_cv**2, (len(minutes), adapters))
                counts = rng.poisson(means[:, np.newaxis] * share * factors)
                minute, who = np.divmod(np.repeat(np.arange(counts.size), counts.ravel()), adapters)
                at_s = 60.0 * (minute + rng.random(len(minute)))
            else:
                counts = rng.poisson(means)
                at_s = np.repeat(60.0 * minutes, counts) + 60.0 * rng.random(counts.sum())
                who = rng.choice(adapters, len(at_s), p=share)
            times.append(at_s)
            owners.append(part * adapters + who)
        time_s, owner = np.concatenate(times), np.concatenate(owners)
        time_s = np.floor(time_s / step_s) * step_s if step_s else time_s
        order = np.argsort(time_s, kind="stable")
        kept = rng.integers(0, len(lengths), len(order))
        input_tokens = lengths.input_tokens[kept] * np.linspace(1.0, longer, len(kept))
        used, index = np.unique(owner[order], return_inverse=True)
        names = tuple(f"adapter-{k:03d}" for k in used.tolist())
        return Trace(
            time_s[order] - time_s[order[0]], input_tokens.astype(np.int64), lengths.output_tokens[kept],
            index.astype(np.int64), names, RANKS.of(names), source="drawn", start_s=START_S,
        )  # fmt: skip

    return made


def _day(mean: float, depth: float, peak_h: float = 3.0) -> Callable[[Any], Any]:
    return lambda hour: mean * (1.0 + depth * np.cos(2.0 * np.pi * (hour - peak_h - 0.5) / HOURS))


LOGS: dict[str, Callable[[], Trace]] = {
    "azure-conv": _file("azure_llm_2023_conv.csv.gz"),
    "azure-code": _file("azure_llm_2023_code.csv.gz"),
    "mooncake": _file("mooncake_synthetic.jsonl.gz"),
    "day": _drawn(_day(5.0, 0.9)),
    "deep-day": _drawn(lambda hour: 14.0 * np.exp(-((hour - 3.5) ** 2)) + 0.5, seed=1),
    "bursty-day": _drawn(_day(5.0, 0.8), burst_cv=0.5, seed=2),
    "own-bursts": _drawn(_day(10.0, 0.9), exponent=0.8, own_cv=1.0, seed=11),
    "spike": _drawn(lambda hour: np.where((hour >= 2.0) & (hour < 3.0), 14.0, 3.0), seed=3),
    "two-services": _drawn(_day(4.0, 0.9, 1.0), second=_day(4.0, 0.9, 4.0), adapters=30, seed=4),
    "steady": _drawn(lambda hour: 9.0, seed=5),
    "whole-seconds": _drawn(_day(5.0, 0.9), step_s=1.0, seed=6),
    "hot": _drawn(_day(6.0, 0.8), adapters=20, exponent=2.0, seed=7),
    "large-bursty-day": _drawn(_day(15.0, 0.9), adapters=150, seed=9, burst_cv=0.5),
    "large-deep-day": _drawn(lambda hour: 45.0 * np.exp(-((hour - 3.5) ** 2)) + 1.0, seed=10),
    "rising-hour": _drawn(lambda hour: 7.0 + 14.0 * hour, hours=1, seed=12),
    "peak-in-hour": _drawn(lambda hour: 14.0 + 5.6 * np.cos(2.0 * np.pi * (hour - 0.5)), hours=1, seed=13),
    "longer-prompts": _drawn(lambda hour: 12.0, hours=1, longer=2.5, seed=14),
    "quiet": _drawn(_day(4.0, 0.8), adapters=400, exponent=0.3, seed=8),
}


USUAL = "p95_ttft_ms=2000,mean_itl_ms=100"
WIDER = {"mooncake": "p95_ttft_ms=30000,mean_itl_ms=300"}


def ask(trace: Trace, slo: str) -> dict[str, Any]:
    """GPUs by each way, and what breaks in the busiest hour as it was."""
    server, solve = packer.load_profile(PROFILE), partial(packer.recommend, slo=slo)
    trace = replace(trace, blocks=None)
    seen = observe_log(trace, Ranks())
    with tempfile.TemporaryDirectory() as folder:
        write_workload(rounded(seen.fleet), f"{folder}/fleet.csv")
        fleet = packer.read_workload(f"{folder}/fleet.csv")
    plans = {"init": solve(seen.fleet, server, log_hour=seen.hour), "from-log": solve(fleet, server)}
    found = observe_replayed(measure_workload(trace, replay=True))
    plans["trace"] = solve(found.fleet, server, log_hour=found.hour)
    rates, trends = periods_of_trace(trace, fleet, HOUR_S)
    day = schedule(fleet, server, rates, trends=trends, slo=slo)
    hour = busiest_requests(trace, rates_of(trace, HOUR_S))
    gpus = {name: plan.n_gpus for name, plan in plans.items()}
    gpus["schedule"] = max(each.gpus for each in day.periods)
    plans["schedule"] = day.static
    verdicts = {name: replayed_on(plan, hour, HOUR_S) for name, plan in plans.items()}
    broken = {}
    for name, verdict in verdicts.items():
        broken[name] = {"holds": verdict.holds, "text": verdict.text}
        if not verdict.holds:
            broken[name]["drawn hours broken"] = drawn_broken(plans[name], min(trace.span_s, HOUR_S))
    measured = seen_in_log(trace, HOUR_S, busiest=True)
    advice = drift(plans["init"], measured, in_log=True, requests=(hour, HOUR_S)).advice
    hindsight = solve(measure_workload(hour, replay=True), server).n_gpus
    mean = solve(observe_log(trace, Ranks(), View("mean")).fleet, server, verify=False).n_gpus
    return {
        "gpus": gpus, "in hindsight": hindsight, "mean alone": mean, "replayed hour": broken, "evaluate --log": advice,
    }  # fmt: skip


def drawn_broken(plan: Any, span_s: float) -> int:
    """In how many of `DRAWS` drawn hours of this length a plan breaks its goal, at the rates that it was made for."""
    seeds = (1_000 + k for k in range(DRAWS))
    runs = (simulate_cluster(plan.workload, plan.cluster(), router="plan", seed=k, duration_s=span_s) for k in seeds)
    return sum(not verdict_of(run).holds for run in runs)


def main() -> None:
    """Ask for each log, print a line, and write results.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    path = Path(__file__).with_name("results.json")
    for name in given.names or LOGS:
        row = ask(LOGS[name](), WIDER.get(name, USUAL))
        counts = row["gpus"].values()
        broken = [way for way, verdict in row["replayed hour"].items() if not verdict["holds"]]
        others = (f"{key} {row[key]}" for key in ("in hindsight", "mean alone", "evaluate --log"))
        print(name, row["gpus"], *others, flush=True)
        print(f"  differ by {max(counts) - min(counts)}; break: {broken or 'none'}", flush=True)
        for way in broken:
            found = row["replayed hour"][way]
            print(f"  {way}: {found['text']} So do {found['drawn hours broken']} of {DRAWS} drawn ones.", flush=True)
        if given.write:  # others may have written theirs
            rows = {**(json.loads(path.read_text("utf-8")) if path.exists() else {}), name: row}
            path.write_text(record_text(rows) + "\n", "utf-8")


if __name__ == "__main__":
    main()
