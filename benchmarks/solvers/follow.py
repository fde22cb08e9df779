"""Changed fleets planned from the servers that ran before: GPUs and moves against a plan made without them.

    uv run python benchmarks/solvers/follow.py --fleets 10 --write

Each fleet of recommended.py with 30 to 200 adapters is planned, then changed in four ways: rates that differ by up to
10 %; an eighth more adapters; a tenth gone and as many new; another rank for an adapter of eight, with rates ± 10 %.
No plan with `old_plan` may have more GPUs than one without it, and noise alone moves at most 10 % of the adapters.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from recommended import fleet_of

import packer
from packer.plan import Plan, Status
from packer.testing.records import record_text

ADAPTERS = range(30, 201)
RECORD = Path(__file__).with_suffix(".json")


def changed(fleet: packer.Workload, seed: int) -> Iterator[tuple[str, packer.Workload]]:
    """The fleet in four changed forms, with what changed."""
    rng = np.random.default_rng(seed)
    factors = rng.uniform(0.9, 1.1, len(fleet)).tolist()
    own = fleet.adapters
    noisy = [replace(each, rate=each.rate * factor) for each, factor in zip(own, factors, strict=True)]
    added = [replace(each, name=f"new-{each.name}") for each in own]
    eighth, tenth = max(1, len(own) // 8), max(1, len(own) // 10)
    gone, new, other = (set(rng.permutation(len(own))[:n].tolist()) for n in (tenth, tenth, eighth))
    stay = [each for i, each in enumerate(own) if i not in gone]
    ranks = [replace(a, rank=2 * a.rank if a.rank < 64 else 8) if i in other else a for i, a in enumerate(noisy)]
    forms = {
        "noise": noisy, "newcomers": [*own, *added[:eighth]], "exchanged": [*stay, *(added[i] for i in sorted(new))],
        "ranks": ranks,
    }  # fmt: skip
    for name, adapters in forms.items():
        yield name, replace(fleet, adapters=tuple(adapters))


def row_of(old: Plan, free: Plan, plan: Plan) -> dict[str, Any]:
    """GPUs before, without and with the running plan; the share of adapters that move on running servers."""
    assert plan.moves is not None
    return {
        "adapters": len(plan.workload), "gpus_before": old.n_gpus, "gpus_without": free.n_gpus, "gpus": plan.n_gpus,
        "status": str(plan.status), "status_without": str(free.status), "verified": plan.verified,
        "moved": round(len(plan.moves.adapters) / len(plan.workload), 4),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each changed fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    parser.add_argument("--write", action="store_true", help="write follow.json")
    options = parser.parse_args(argv)
    sized = (pair for pair in enumerate(map(fleet_of, count(options.first)), options.first))
    fleets = (pair for pair in sized if len(pair[1][0]) in ADAPTERS)
    rows: dict[str, dict[str, Any]] = {}
    for number, (fleet, profile) in islice(fleets, options.fleets):
        old = packer.recommend(fleet, profile)
        for name, new in changed(fleet, number):
            free = packer.recommend(new, profile)
            row = rows[f"{number} {fleet.name} {name}"] = row_of(
                old, free, packer.recommend(new, profile, old_plan=old)
            )
            print(f"{number} {fleet.name} {name}: {row}", flush=True)
        if options.write:
            RECORD.write_text(record_text(rows) + "\n", "utf-8")
    more = [k for k, v in rows.items() if v["status_without"] != Status.INFEASIBLE and v["gpus"] > v["gpus_without"]]
    noise = max((v["moved"] for k, v in rows.items() if k.endswith("noise")), default=0.0)
    print(f"{len(rows)} changed fleets: {more or 'none'} with more GPUs; rates ± 10 %: at most {noise:.1%} moved")


if __name__ == "__main__":
    main()
