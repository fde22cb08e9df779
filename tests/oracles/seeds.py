"""Simulations of one server that differ by their seeds."""

from __future__ import annotations

from typing import Any

from packer.profile import Profile
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.uncertainty import repeated
from packer.workload import Workload

REPEATED = ("seeds", "seed", "jobs", "progress")


def simulate_seeds(workload: Workload, profile: Profile, *, max_loras: int, **given: Any) -> list[Run]:
    """`simulate` with each of the seeds; what `repeated` takes goes there."""
    how = {name: given.pop(name) for name in REPEATED if name in given}
    return repeated(lambda k: simulate(workload, profile, max_loras=max_loras, seed=k, **given), **how)
