"""Recommended plans on generated fleets, simulated again on hours that no search has seen.

    uv run python benchmarks/solvers/recommended.py --write

Fleets differ in size, load, lengths, ranks, limits, arrivals and profile. For each adapter and each of the hours: how
much of its limits it uses (1 is all of them) by the 95th percentile of its own requests, however few; for each GPU
whether it starves or its queue grows. `--fewer` plans each fleet for one GPU fewer, too, and says whether that plan
keeps all limits in `FEWER_HOURS` fresh hours at the rates as given, and raised by the margin. `--splits SECONDS`
searches plans on one GPU fewer by other means, for so long in CPU time: even splits and splits by rank, with noise, any
slots.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import packer
from packer.arrival import Arrivals, Bursts
from packer.checks import slot_rank_for
from packer.goal import Limits, Slo
from packer.solvers.candidates import max_loras_candidates
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
PROFILES = ("h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct")
FIRST_SEED = 770_001
"""Far from the seeds of any search."""
SEARCHED = 660_001
"""Of the hours in which splits are looked for; they are evaluated in others."""
FEWER_HOURS = 5
FEW = 60
"""Requests in an hour below which the 95th percentile of an adapter is that of few requests: plans hold its server to
the limits instead."""

Draw = Callable[[np.random.Generator], packer.Workload]


def few_hot(rng: np.random.Generator) -> packer.Workload:
    """A few adapters with most of the load, the rest quiet."""
    hot, quiet = int(rng.integers(2, 6)), int(rng.integers(10, 60))
    rates = [*rng.uniform(2.0, 5.0, hot), *rng.uniform(0.005, 0.05, quiet)]
    return packer.Workload([packer.Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)])


def many_quiet(rng: np.random.Generator) -> packer.Workload:
    """Hundreds of adapters with a request every few minutes each."""
    rates = rng.lognormal(np.log(0.01), 1.2, int(rng.integers(200, 500)))
    return packer.Workload([packer.Adapter(f"a{i}", 8, float(min(rate, 1.0))) for i, rate in enumerate(rates)])


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


def thousands(rng: np.random.Generator) -> packer.Workload:
    """Thousands of adapters with a handful of requests an hour."""
    n = int(rng.integers(1_000, 3_001))
    rates = rng.lognormal(np.log(0.004), 1.0, n)
    return packer.Workload([packer.Adapter(f"a{i}", int(rng.choice((8, 16))), float(rates[i])) for i in range(n)])


def tiny(rng: np.random.Generator) -> packer.Workload:
    """Five adapters."""
    return packer.Workload([packer.Adapter(f"a{i}", 32, float(rate)) for i, rate in enumerate(rng.uniform(0.1, 2, 5))])


def one_token(rng: np.random.Generator) -> packer.Workload:
    """Classifiers: prompts whose answer is one token."""
    rates = rng.lognormal(0.0, 1.0, int(rng.integers(20, 120)))
    adapters = [packer.Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)]
    prompt = packer.Lengths.gamma(mean=float(rng.uniform(200, 900)), cv=0.7)
    return packer.Workload(adapters, prompt, packer.Lengths.constant(1))


def long_prompts(rng: np.random.Generator) -> packer.Workload:
    """Prompts of several thousand tokens with short answers."""
    rates = rng.uniform(0.01, 0.2, int(rng.integers(15, 60)))
    adapters = [packer.Adapter(f"a{i}", int(rng.choice((8, 32))), float(rate)) for i, rate in enumerate(rates)]
    prompt = packer.Lengths.gamma(mean=float(rng.uniform(3_000, 8_000)), cv=0.7)
    return packer.Workload(adapters, prompt, packer.Lengths.gamma(mean=150.0, cv=1.0))


def classes(rng: np.random.Generator) -> packer.Workload:
    """Chat with narrow limits beside batches with wide ones."""
    n = int(rng.integers(30, 100))
    names, rates = rng.choice(("chat", "batch"), n), rng.lognormal(np.log(0.2), 0.8, n)
    slo = Slo(classes=(("chat", Limits(500.0, 40.0)), ("batch", Limits(15_000.0, 200.0))))
    adapters = [
        packer.Adapter(f"a{i}", int(rng.choice((16, 32))), float(rates[i]), slo_class=str(names[i])) for i in range(n)
    ]
    return packer.Workload(adapters, slo=slo)


def spread_lengths(rng: np.random.Generator) -> packer.Workload:
    """Lengths that differ by two orders of magnitude from request to request."""
    rates = rng.uniform(0.05, 0.4, int(rng.integers(30, 80)))
    adapters = [packer.Adapter(f"a{i}", 16, float(rate)) for i, rate in enumerate(rates)]
    return packer.Workload(adapters, packer.Lengths.gamma(mean=500.0, cv=3.0), packer.Lengths.gamma(mean=350.0, cv=2.5))


KINDS: tuple[Draw, ...] = (
    *(few_hot, many_quiet, long_outputs, high_ranks, own_lengths, bursty, changing),
    *(thousands, tiny, one_token, long_prompts, classes, spread_lengths),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=2 * len(KINDS))
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    parser.add_argument("--hours", type=int, default=2, help="fresh hours of each GPU")
    parser.add_argument("--fewer", action="store_true", help="look whether one GPU fewer keeps the goal, too")
    parser.add_argument("--splits", type=float, default=0.0, help="seconds for splits on one GPU fewer")
    parser.add_argument("--write", action="store_true", help="write recommended.json beside this file")
    parser.add_argument("-o", "--output", type=Path, default=HERE / "recommended.json", help="where --write goes")
    options = parser.parse_args(argv)
    rows = []
    for number in range(options.first, options.first + options.fleets):
        rows.append(row := one(number, options.hours, options.fewer, options.splits))
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    done = [row for row in rows if row["status"] != "infeasible"]
    total = {key: sum(row[key] for row in done) for key in ("adapters", "gpus", *COUNTED)}
    print(
        f"{len(rows)} fleets, {len(done)} plans that keep the limits; in {options.hours} fresh hours of "
        f"{total['adapters']:,} adapters on {total['gpus']} GPUs: {total['beyond']} adapter-hours beyond the limits "
        f"({total['beyond_few']} of fewer than {FEW} requests), {total['beyond_twice']} beyond twice, "
        f"{total['growing']} growing queues, {total['starved']} starved servers"
    )
    if options.fewer:
        print(
            f"one GPU fewer keeps all limits in {FEWER_HOURS} hours: {sum(row['fewer_keep'] for row in rows)} fleets, "
            f"{sum(row['fewer_keep_margin'] for row in rows)} of them with rates raised by the margin"
        )
    if options.splits:
        print(
            f"a split on one GPU fewer keeps them: {sum(row['split_keeps'] for row in rows)} fleets, "
            f"{sum(row['split_keeps_margin'] for row in rows)} of them with rates raised by the margin"
        )
    if options.write:
        options.output.write_text(record_text(rows) + "\n", "utf-8")


COUNTED = ("beyond", "beyond_few", "beyond_twice", "starved", "growing")


def fleet_of(number: int) -> tuple[packer.Workload, packer.Profile]:
    """The fleet of that number, from half a server's load to about six servers', and its profile."""
    rng = np.random.default_rng((number, 1_300))
    draw = KINDS[number % len(KINDS)]
    fleet = draw(rng)
    factor = 10.0 ** float(rng.uniform(3.4, 4.6)) / fleet.offered_tok_s
    most = float(fleet.offered_tok_s_by_adapter.max())  # no adapter beyond what one server carries
    fleet = replace(fleet.scaled(min(factor, 3000.0 / most)), name=f"{draw.__name__}-{number}")
    return fleet, packer.load_profile(PROFILES[(number + number // len(KINDS)) % 2])


def one(number: int, hours: int, fewer: bool, splits_s: float = 0.0) -> dict[str, Any]:
    """One fleet: its plan, and the plan's servers on fresh hours."""
    fleet, profile = fleet_of(number)
    started, cpu = time.perf_counter(), time.process_time()
    plan = packer.recommend(fleet, profile)
    row: dict[str, Any] = {
        "fleet": fleet.name,
        "profile": profile.model.name,
        "adapters": len(fleet),
        "status": str(plan.status),
        "gpus": plan.n_gpus,
        "worst_use": 0.0,
        **dict.fromkeys(COUNTED, 0),
        "worst_beyond_twice": [],
        "plan_s": round(time.perf_counter() - started, 1),
        "plan_cpu_s": round(time.process_time() - cpu, 1),
    }
    for run in _fresh(plan.bins, fleet, hours):
        used = _used(run)
        number_of = np.bincount(run.raw.requests.adapter, minlength=len(run.workload))
        row["worst_use"] = max(row["worst_use"], round(float(used.max()), 2))
        row["beyond"] += int((used > 1.0).sum())
        row["beyond_few"] += int(((used > 1.0) & (number_of < FEW)).sum())
        row["beyond_twice"] += int((used > 2.0).sum())
        row["worst_beyond_twice"] += [
            (run.workload.names[i], round(float(used[i]), 2), int(number_of[i])) for i in np.flatnonzero(used > 2.0)[:3]
        ]
        row["starved"] += int(run.starved)
        row["growing"] += int(not run.stable)
    raised = fleet.scaled(1.0 + (plan.margin or 0.0))
    if fewer:
        bins = packer.recommend(fleet, profile, max_gpus=plan.n_gpus - 1).bins if plan.n_gpus > 1 else ()
        row["fewer_keep"], row["fewer_keep_margin"] = _keeps(bins, fleet), _keeps(bins, raised)
    if splits_s:
        found, n = plan.n_gpus > 1, plan.n_gpus - 1
        row["split_keeps"] = found = found and _split_keeps(fleet, profile, n, splits_s)
        row["split_keeps_margin"] = found and _split_keeps(raised, profile, n, splits_s)
    return row


def _split_keeps(fleet: packer.Workload, profile: packer.Profile, n: int, limit_s: float) -> bool:
    """Whether a split over so many servers keeps all limits: each adapter to the least loaded server, by falling load
    (LPT), in turns, or by rank; then the same with noise in the loads, each with slots from few to one an adapter."""
    rng, loads, started = np.random.default_rng(n), fleet.offered_tok_s_by_adapter, time.process_time()
    noise = 0.0
    while time.process_time() - started < limit_s:
        noisy = loads * rng.lognormal(0.0, noise, len(loads))
        falling = np.argsort(-noisy, kind="stable")
        by_rank = np.lexsort((-noisy, -fleet.ranks))
        shares = np.cumsum(loads[by_rank]) - loads[by_rank] / 2.0
        for parts in (
            _least_loaded(falling, loads, n),
            [falling[k::n].tolist() for k in range(n)],
            [by_rank[np.minimum(shares * n / loads.sum(), n - 1).astype(int) == k].tolist() for k in range(n)],
        ):
            for bins in _slotted(fleet, profile, parts) if all(parts) else ():
                if _keeps(bins, fleet, SEARCHED) and _keeps(bins, fleet):
                    return True
            if time.process_time() - started > limit_s:
                break
        noise = 0.3
    return False


def _least_loaded(order: np.ndarray[Any, Any], loads: np.ndarray[Any, Any], n: int) -> list[list[int]]:
    """Each adapter to the server with the least load so far."""
    parts: list[list[int]] = [[] for _ in range(n)]
    total = np.zeros(n)
    for i in order.tolist():
        k = int(total.argmin())
        parts[k].append(i)
        total[k] += loads[i]
    return parts


def _slotted(
    fleet: packer.Workload, profile: packer.Profile, parts: Sequence[Sequence[int]]
) -> Iterator[list[packer.Bin]]:
    """The servers with as many slots as candidates have, from the most to the fewest."""
    for slots in (10_000, 96, 48, 32, 16, 8):
        bins = []
        for part in parts:
            rank = slot_rank_for(int(fleet.ranks[list(part)].max()))
            most = max_loras_candidates(len(part), profile, rank)[-1]
            bins.append(packer.Bin(tuple(part), profile.settings(min(slots, most), rank), profile))
        if slots < max(len(part) for part in parts) or slots == 10_000:
            yield bins


def _fresh(
    bins: Sequence[packer.Bin], fleet: packer.Workload, hours: int, first: int = FIRST_SEED
) -> Iterator[packer.Run]:
    """The servers of a plan in hours that no search has seen, the most loaded ones first."""
    for item in sorted(bins, key=lambda item: -item.offered_tok_s(fleet)):
        for hour in range(hours):
            yield packer.simulate(
                item.workload(fleet),
                item.profile,
                max_loras=item.max_loras,
                max_lora_rank=item.max_lora_rank,
                seed=first + 101 * hour,
            )


def _keeps(bins: Sequence[packer.Bin], fleet: packer.Workload, first: int = FIRST_SEED) -> bool:
    """Whether servers of all adapters keep their limits in all hours from a seed on, without a queue that grows."""
    placed = {adapter for item in bins for adapter in item.adapters}
    return len(placed) == len(fleet) and all(
        run.status == "ok" and run.stable and not run.starved and bool((_used(run) <= 1.0).all())
        for run in _fresh(bins, fleet, FEWER_HOURS, first)
    )


def _used(run: packer.Run) -> np.ndarray[Any, Any]:
    """How much of its limits each adapter uses by its own figures, whatever the server's queue does."""
    ttft_ms, itl_ms = run.workload.slo.columns(run.workload)
    ttft = np.nan_to_num(run.adapter_p95_ttft_ms, nan=0.0) / ttft_ms
    return np.maximum(ttft, np.nan_to_num(run.adapter_mean_itl_ms, nan=0.0) / itl_ms)


if __name__ == "__main__":
    main()
