"""Changed fleets planned from the servers that ran before: GPUs and moves against a plan made without them.

    uv run python benchmarks/solvers/follow.py --fleets 20

Each fleet of recommended.py is planned, then changed in three ways: rates that differ by up to 10 %, an eighth more
adapters, a third fewer. No plan with `old_plan` may have more GPUs than one without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from recommended import fleet_of

import packer
from packer.plan import Status

MOST_ADAPTERS = 600


def changed(fleet: packer.Workload, seed: int) -> Iterator[tuple[str, packer.Workload]]:
    """The fleet in three changed forms, with what changed."""
    rng = np.random.default_rng(seed)
    factors = rng.uniform(0.9, 1.1, len(fleet)).tolist()
    own = fleet.adapters
    noisy = [replace(each, rate=each.rate * factor) for each, factor in zip(own, factors, strict=True)]
    more = [*own, *(replace(each, name=f"new-{each.name}") for each in own[: max(1, len(own) // 8)])]
    for name, adapters in (("noise", noisy), ("newcomers", more), ("gone", [*own[::2], *own[1::4]])):
        yield name, replace(fleet, adapters=tuple(adapters))


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, run, and print a line for each changed fleet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first fleet")
    options = parser.parse_args(argv)
    more, moves, runs = 0, [], 0
    for number in range(options.first, options.first + options.fleets):
        fleet, profile = fleet_of(number)
        if len(fleet) > MOST_ADAPTERS:
            continue
        old = packer.recommend(fleet, profile)
        for name, new in changed(fleet, number):
            free = packer.recommend(new, profile)
            plan = packer.recommend(new, profile, old_plan=old)
            assert plan.moves is not None
            moved = len(plan.moves.adapters) / len(new)
            runs += 1
            more += free.status is not Status.INFEASIBLE and plan.n_gpus > free.n_gpus
            moves += [moved] if name == "noise" else []
            print(
                f"{fleet.name} {name}: {old.n_gpus} GPUs before, {free.n_gpus} without them, {plan.n_gpus} from them "
                f"({plan.status}, verified {plan.verified}), {moved:.0%} moved",
                flush=True,
            )
    print(f"{runs} changed fleets: {more} with more GPUs; rates ± 10 %: at most {max(moves):.0%} moved")


if __name__ == "__main__":
    main()
