"""Search the largest training throughput of a server within its latency limits, tuning policies as their papers do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packer.progress import Progress, silent
from packer.twin.threads import in_threads
from packer.profile import Profile
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.tuning.policy import load_policy
from packer.workload import Workload


@dataclass(frozen=True)
class Tuned:
    """A policy with its best parameters and the run with them.

    `best`: None if no parameters keep the limits; `simulation` is then the run with the least training. `tried`:
    (policy with its parameters, training tok/s, whether the limits are kept).
    """

    policy: str
    best: str | None
    simulation: Run
    tried: tuple[tuple[str, float, bool], ...]

    @property
    def samples_s(self) -> float:
        """Training throughput, samples/s; 0 if the limits can't be kept."""
        trained = self.simulation.tuning
        return 0.0 if self.best is None or trained is None else trained.samples_s

    @property
    def tok_s(self) -> float:
        """Training throughput, tok/s; 0 if the limits can't be kept."""
        return 0.0 if self.best is None else self.simulation.tuning_tok_s

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        row: dict[str, Any] = {"policy": self.policy, "best": self.best}
        row |= {"samples_s": self.samples_s, "tuning_tok_s": self.tok_s}
        row |= {name: getattr(self.simulation, name) for name in ("p99_ttft_ms", "p99_tpot_ms")}
        return row | {"tried": [list(each) for each in self.tried]}


def most_training(workload: Workload, profile: Profile, policy: str, *, workers: int = 1, **server: Any) -> Tuned:
    """Try the values of the policy's searched parameter and return the one that trains most within the limits.

    `policy`: its name, with parameters that stay as they are; naming the searched one tries only that value. `workers`:
    threads. `server`: as `packer.simulate` takes it. The server must keep its latency goal and not starve.
    """
    specs = candidates(policy)

    def run(spec: str) -> Run:
        return simulate(workload, profile, tuning=spec, **server)

    found = list(in_threads(run, specs, workers))
    # A server without requests keeps all limits.
    good = [not sim.starved and (not sim.sent or sim.slo_used <= 1.0) for sim in found]
    most = [(ok, sim.tuning_tok_s if ok else -sim.tuning_tok_s) for ok, sim in zip(good, found, strict=True)]
    best = most.index(max(most))
    return Tuned(
        load_policy(policy).name,
        specs[best] if good[best] else None,
        found[best],
        tuple((spec, sim.tuning_tok_s, ok) for spec, sim, ok in zip(specs, found, good, strict=True)),
    )


def candidates(policy: str) -> Sequence[str]:
    """Return the policy with each value of its searched parameter."""
    name, values = load_policy(policy).searched
    if f"{name}=" in policy:
        return [policy]
    joint = "," if ":" in policy else ":"
    return [f"{policy}{joint}{name}={value:g}" for value in values]


def tuning_rows(
    workload: Workload, profile: Profile, policies: Sequence[str], *, rate_factors: Sequence[float] = (1.0,),
    max_loras: Sequence[int], progress: Progress = silent, **given: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return one row for each number of slots, rate factor and policy; `given`: see `most_training`."""
    grid = [(slots, factor, policy) for slots in max_loras for factor in rate_factors for policy in policies]
    found = []
    for k, (slots, factor, policy) in enumerate(grid):
        fleet = workload if factor == 1.0 else workload.scaled(factor)
        tuned = most_training(fleet, profile, policy, max_loras=slots, **given)
        found.append({"max_loras": slots, "rate_factor": factor, "rate": fleet.rate, **tuned.to_dict()})
        progress("tuning", k + 1, len(grid))
    return found
