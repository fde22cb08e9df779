"""Recommended plans on generated fleets, simulated again on hours that no search has seen.

    uv run python benchmarks/solvers/recommended.py --fleets 24 --write

Fleets differ in how load is spread, lengths, ranks, arrivals and profile. For each GPU and each of the hours: how much
of the latency goal its worst adapter uses (1 is all of it), and whether the GPU starves or its queue grows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.arrival import Arrivals, Bursts
from packer.slo import Limits

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
FIRST_SEED = 770_001
"""Far from the seeds of any search."""

Draw = Callable[[np.random.Generator], packer.Workload]


def few_hot(rng: np.random.Generator) -> packer.Workload:
    """A few adapters with most of the load, the rest quiet."""
    hot, quiet = int(rng.integers(2, 6)), int(rng.integers(10, 60))
    rates = [*rng.uniform(2.0, 5.0, hot), *rng.uniform(0.005, 0.05, quiet)]
    return packer.Workload([packer.Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)])


def many_quiet(rng: np.random.Generator) -> packer.Workload:
    """Hundreds of adapters with a request every few minutes each."""
    rates = rng.lognormal(np.log(0.01), 1.2, int(rng.integers(200, 500)))
    return packer.Workload(
        [packer.Adapter(f"a{i}", 8, float(min(rate, 1.0))) for i, rate in enumerate(rates)]
    )


def long_outputs(rng: np.random.Generator) -> packer.Workload:
    """Answers of a thousand tokens and more."""
    rates = rng.uniform(0.05, 0.4, int(rng.integers(15, 50)))
    adapters = [packer.Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)]
    output = packer.Lengths.gamma(mean=float(rng.uniform(800, 1800)), cv=0.8)
    return packer.Workload(adapters, packer.Lengths.gamma(mean=300.0, cv=1.0), output)


def high_ranks(rng: np.random.Generator) -> packer.Workload:
    """Ranks up to 128, which take much of the memory."""
    n = int(rng.integers(20, 90))
    ranks, rates = rng.choice((8, 32, 64, 128), n), rng.uniform(0.05, 0.5, n)
    return packer.Workload([packer.Adapter(f"a{i}", int(ranks[i]), float(rates[i])) for i in range(n)])


def own_lengths(rng: np.random.Generator) -> packer.Workload:
    """Every adapter with lengths of its own: summaries, chat and extraction."""
    adapters = []
    for i in range(int(rng.integers(20, 60))):
        mean_in, mean_out = [(1800.0, 120.0), (300.0, 400.0), (900.0, 20.0)][int(rng.integers(3))]
        factor = float(rng.lognormal(0.0, 0.3))
        adapters.append(
            packer.Adapter(
                f"a{i}",
                int(rng.choice((8, 16, 32))),
                float(rng.lognormal(np.log(0.12), 0.9)),
                packer.Lengths.gamma(mean=mean_in * factor, cv=0.8),
                packer.Lengths.gamma(mean=mean_out * factor, cv=0.9),
            )
        )
    return packer.Workload(adapters)


def bursty(rng: np.random.Generator) -> packer.Workload:
    """Requests that come in bursts, some of them common to all adapters."""
    rates = rng.lognormal(np.log(0.1), 1.0, int(rng.integers(30, 120)))
    adapters = [packer.Adapter(f"a{i}", 16, float(min(rate, 2.0))) for i, rate in enumerate(rates)]
    common = Bursts(float(rng.uniform(0.2, 0.6)), ((30.0, 0.5), (600.0, 0.5)))
    own = Bursts(float(rng.uniform(0.5, 2.0)), ((60.0, 1.0),))
    return packer.Workload(adapters, arrivals=Arrivals("bursty", common=common, own=own))


def changing(rng: np.random.Generator) -> packer.Workload:
    """The paper's unpredictable scenario: every five minutes each adapter's rate halves or doubles."""
    rates = rng.choice((0.4, 0.2, 0.1), int(rng.integers(30, 120)))
    adapters = [packer.Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)]
    return packer.Workload(adapters, arrivals=Arrivals("unpredictable"))


KINDS: tuple[Draw, ...] = (few_hot, many_quiet, long_outputs, high_ranks, own_lengths, bursty, changing)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    parser.add_argument("--hours", type=int, default=2, help="fresh hours of each GPU")
    parser.add_argument("--write", action="store_true", help="write recommended.json beside this file")
    options = parser.parse_args(argv)
    rows = []
    for number in range(options.first, options.first + options.fleets):
        rows.append(row := one(number, options.hours))
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    done = [row for row in rows if row["status"] == "feasible"]
    print(
        f"{len(rows)} fleets, {len(done)} plans that keep the goal; in fresh hours: "
        f"{sum(row['beyond_twice'] for row in done)} GPUs with an adapter beyond twice its goal, "
        f"{sum(row['growing'] for row in done)} with a growing queue, {sum(row['starved'] for row in done)} starved, "
        f"of {sum(row['gpus'] for row in done)}"
    )
    if options.write:
        (HERE / "recommended.json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def one(number: int, hours: int) -> dict[str, Any]:
    """One fleet: its plan, and the plan's GPUs on fresh hours."""
    rng = np.random.default_rng((number, 99))
    draw = KINDS[number % len(KINDS)]
    fleet = draw(rng)
    # From half a server's load to about six servers'; no adapter beyond what one carries.
    factor = 10.0 ** float(rng.uniform(3.4, 4.6)) / fleet.offered_tok_s
    most = float(fleet.offered_tok_s_by_adapter.max())
    fleet = replace(fleet.scaled(min(factor, 3000.0 / most)), name=f"{draw.__name__}-{number}")
    profile = packer.load_profile(PROFILES[(number // len(KINDS)) % 2])
    started = time.perf_counter()
    plan = packer.recommend(fleet, profile)
    taken = time.perf_counter() - started
    worst, starved, growing, beyond = 0.0, 0, 0, 0
    for item in plan.bins:
        runs = [
            packer.simulate(
                item.workload(fleet),
                item.profile,
                max_loras=item.max_loras,
                max_lora_rank=item.max_lora_rank,
                seed=FIRST_SEED + 101 * hour,
            )
            for hour in range(hours)
        ]
        used = [float(np.max(_used(run))) for run in runs]
        worst = max(worst, *used)
        beyond += any(value > 2.0 for value in used)
        starved += any(run.starved for run in runs)
        growing += any(not run.stable for run in runs)
    return {
        "fleet": fleet.name,
        "profile": profile.model.name,
        "adapters": len(fleet),
        "status": str(plan.status),
        "gpus": plan.n_gpus,
        "worst_use_of_goal": round(worst, 2),
        "beyond_twice": beyond,
        "starved": starved,
        "growing": growing,
        "plan_s": round(taken, 1),
    }


def _used(run: packer.Simulation) -> np.ndarray[Any, Any]:
    """How much of the goal each adapter uses by its own figures, whatever the server's queue does."""
    goal = Limits()
    ttft = np.nan_to_num(run.adapter_p95_ttft_ms, nan=0.0) / goal.p95_ttft_ms
    return np.maximum(ttft, np.nan_to_num(run.adapter_mean_itl_ms, nan=0.0) / goal.mean_itl_ms)


if __name__ == "__main__":
    main()
