"""Runs as the calibration simulates them, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packer.profile import Profile
from packer.twin.fit.runs import fleet_of
from packer.twin.fit.tables import Run
from packer.twin.result import Simulation
from packer.twin.simulate import simulate
from packer.workload import Workload


@dataclass(frozen=True, eq=False)
class Target:
    """A run, the workload that stands for it, and the seed of its draws."""

    run: Run
    workload: Workload
    seed: int


def targets_of(runs: Sequence[Run], seed: int = 0) -> list[Target]:
    """Targets of the runs that started; each has a seed of its own, the same in every evaluation."""
    return [Target(run, fleet_of(run), seed + k) for k, run in enumerate(run for run in runs if run.ok)]


def simulate_target(
    target: Target, profile: Profile, max_outstanding: int | None, *, mean_state: bool = False
) -> Simulation:
    """The twin of one run."""
    run = target.run
    return simulate(
        target.workload,
        profile,
        max_loras=run.max_loras,
        max_lora_rank=run.max_lora_rank,
        duration_s=run.duration_s,
        seed=target.seed,
        max_outstanding=max_outstanding,
        mean_state=mean_state,
    )
