"""The decision of `packer solve` beside other systems on as many servers, for nine kinds of fleet.

uv run python benchmarks/nine_fleets.py                    # print
uv run python benchmarks/nine_fleets.py --only overload    # one fleet
uv run python benchmarks/nine_fleets.py --write            # nine_fleets.json and .md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cluster import ROOT, SEEDS, tuned

import packer
from packer.arrival import Arrivals, Bursts
from packer.cluster import Cluster
from packer.io.files import write_text
from packer.testing.records import record_text
from packer.twin.uncertainty import interval

PROFILE = "h100-64gb/llama-3.1-8b-instruct"
SYSTEMS = ("affinity", "llm-d", "vllm", "hrw", "ray-serve", "dynamo")
SLO = {"ttft_ms": 2000.0, "tpot_ms": 100.0}
RUN_S, TUNING_S = 1800.0, 600.0
BURSTS = Arrivals("bursty", common=Bursts(0.5, ((30.0, 1.0),)))
OVERLOAD = 1.3
"""Rates of the fleet `overload` over those that the plan is made for."""


def fleet(count: int, total: float, exponent: float, ranks: tuple[int, ...] = (8, 16, 32)) -> packer.Workload:
    """`count` adapters with `total` req/s by a power law of popularity."""
    rng = np.random.default_rng(count)
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    rates, drawn = total * weights / weights.sum(), rng.choice(ranks, count)
    members = [packer.Adapter(f"a{i}", int(k), float(r)) for i, (k, r) in enumerate(zip(drawn, rates, strict=True))]
    return packer.Workload(members)


def with_a_hot_one() -> packer.Workload:
    """Half of the requests are for one adapter."""
    rest = fleet(60, 20.0, 0.5)
    return packer.Workload([packer.Adapter("hot", 16, 20.0), *rest.adapters])


FLEETS: dict[str, tuple[str, Callable[[], packer.Workload]]] = {
    "azure": ("200 adapters of an hour of Azure's conversations, bursts", lambda: packer.read_workload(
        ROOT / "examples/workloads/azure-conv-2023.csv")),
    "hot": ("half of the load on one of 61 adapters", with_a_hot_one),
    "few": ("8 adapters, 60 req/s", lambda: fleet(8, 60.0, 0.5)),
    "quiet": ("1,000 adapters, 20 req/s", lambda: fleet(1000, 20.0, 0.3)),
    "skewed": ("300 adapters, 40 req/s, exponent 1", lambda: fleet(300, 40.0, 1.0)),
    "uniform": ("120 adapters, 40 req/s, equal rates", lambda: fleet(120, 40.0, 0.0)),
    "ranks": ("150 adapters of rank 8 to 64, 30 req/s", lambda: fleet(150, 30.0, 0.7, (8, 16, 32, 64))),
    "bursty": ("100 adapters, 30 req/s, bursts of 30 s", lambda: fleet(100, 30.0, 0.7).with_arrivals(BURSTS)),
    "overload": (f"150 adapters at {OVERLOAD} × the planned 30 req/s", lambda: fleet(150, 30.0, 0.7)),
}  # fmt: skip

HEAD = """# The decision of `packer solve` beside other systems, on nine kinds of fleet

Share of the requests with TTFT ≤ 2 s and TPOT ≤ 100 ms (mean TPOT, ms): means of six half hours that no tuning saw. The
plan is the decision with its own number of servers; each other system has as many servers, with slots (and slack, and
weights) tuned by twelve tries on other hours. A system is better than the plan if the difference, seed by seed, is
above a thousandth and beyond its 95 % interval. Written by `benchmarks/nine_fleets.py --write`.

"""


def gap(ours: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, float]:
    """Mean of the differences, ours less theirs, seed by seed, and half of its 95 % interval."""
    found = interval(np.array(ours) - np.array(theirs))
    assert found.mean is not None
    assert found.low is not None
    return found.mean, found.mean - found.low


def compared(name: str) -> dict[str, Any]:
    """One fleet: the decision, each other system tuned on as many servers, and whether the plan loses."""
    text, make = FLEETS[name]
    planned_for, profile = make(), packer.load_profile(PROFILE)
    plan = packer.recommend(planned_for, profile, slo=SLO)
    served = planned_for.scaled(OVERLOAD) if name == "overload" else planned_for
    servers = len(plan.bins)
    rank = 2 ** int(np.ceil(np.log2(max(planned_for.ranks))))
    free = replace(Cluster.of(profile, servers, max_loras=32, max_lora_rank=rank), slo=SLO)
    own = replace(plan.cluster(), slo=SLO)
    (ours,) = packer.compare_systems(served, own, ["packer"], seeds=SEEDS, duration_s=RUN_S)
    rows = {"packer": (ours, "its own")}
    for system in SYSTEMS:
        how, own, settings = tuned(served, free, system, TUNING_S)
        (found,) = packer.compare_systems(served, own, [how], seeds=SEEDS, duration_s=RUN_S)
        rows[system] = found, settings
    cells, losses = {}, []
    for system, (found, settings) in rows.items():
        mean, half = gap(ours.seeds["slo_attainment"], found.seeds["slo_attainment"])
        if mean < -0.001 and mean + half < 0.0:
            losses.append(system)
        cells[system] = {
            "settings": settings,
            "slo": found.figures["slo_attainment"].mean,
            "tpot_ms": found.figures["mean_tpot_ms"].mean,
            "behind_packer": mean,
            "half": half,
        }
    return {"fleet": text, "servers": servers, "systems": cells, "better_than_packer": losses}


def table(found: dict[str, dict[str, Any]]) -> str:
    """One row per fleet: share of the requests within the SLO (TPOT, ms) of each system, and who is better."""
    heads = ["fleet", "servers", *(f"`{name}`" for name in ("packer", *SYSTEMS)), "better than the plan"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in found.values():
        cells = [f"{each['slo']:.3f} ({each['tpot_ms']:.0f})" for each in row["systems"].values()]
        better = ", ".join(row["better_than_packer"]) or "none"
        lines.append("| " + " | ".join([row["fleet"], str(row["servers"]), *cells, better]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate, print, and with --write keep."""
    parser = argparse.ArgumentParser(description="Compare systems on nine fleets.")
    parser.add_argument("--only", choices=tuple(FLEETS), help="one of the fleets; the others as they are kept")
    parser.add_argument("--write", action="store_true", help="keep the results")
    options = parser.parse_args()
    path = Path(__file__).with_suffix(".json")
    found = json.loads(path.read_text("utf-8")) if options.only else {}
    for name in [options.only] if options.only else FLEETS:
        found[name] = compared(name)
        print(name, found[name]["servers"], found[name]["better_than_packer"], flush=True)
    print(table(found))
    if options.write:
        write_text(path, record_text(found) + "\n", force=True)
        write_text(path.with_suffix(".md"), HEAD + table(found), force=True)


if __name__ == "__main__":
    main()
