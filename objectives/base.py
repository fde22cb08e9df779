"""What an objective is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import ClassVar, Self

import numpy as np

from packer import registry
from packer.arrays import BoolArray
from packer.bin import Bin
from packer.errors import IncompatibleError, ValidationError, shown
from packer.evaluation import FIGURES, STARVATION_THRESHOLD, Evaluations
from packer.goal import KEYS, OF_MANY, OF_REQUESTS, SPELLINGS, Goal, assignments
from packer.memo import Memo
from packer.profile import Profile
from packer.workload import Workload

STABLE_FACTOR = 1.02 / STARVATION_THRESHOLD
"""A server that does not starve at rates times this factor serves 1.02 times its load, so its queue does not grow."""


@dataclass(frozen=True)
class Scenario:
    """A load at which the bins of a plan must hold: a fleet, with every rate multiplied by `factor`. `name` completes
    "it starves …" in messages: "at 1.25 times the rates"."""

    workload: Workload
    factor: float = 1.0
    name: str = "at the rates as given"


class Objective:
    """What a plan minimises and which bins it may contain; the fields of the dataclass are the parameters.

    Inherit from this class and override what differs from "fewest GPUs, no server starves or fails to start".

    `name`: the objective's name on the command line.
    `minimises`: what the first entry of `key` is: "gpus", "price" (per hour), "latency" (ms) or another word. Solvers
    that minimise GPUs or prices refuse objectives with a word that they do not support.
    `fixed_gpus`: True: the number of GPUs is given (`max_gpus`) and the solver spreads over all of them; False: the
    solver chooses how many to use, at most `max_gpus`.
    `balances`: whether even loads improve the key. If False, a search over a fixed number of GPUs also tries uneven
    loads.
    `goal`: the latency goal that every bin must keep (`within`); None for no goal.
    """

    goal: Goal | None = None
    name: ClassVar[str] = ""
    minimises: ClassVar[str] = "gpus"
    fixed_gpus: ClassVar[bool] = False
    balances: ClassVar[bool] = True

    @property
    def limits(self) -> Mapping[str, float]:
        """Largest value that each figure of `Evaluations` may have for a bin, by name: the goal's limits."""
        return {} if self.goal is None else _limits_of(self.goal)

    @property
    def required(self) -> set[str]:
        """The figures that the predictor must give: a bin without one of them is not admitted. `slo_used` is not
        required if no limit needs simulated requests: limits on adapters are then checked against the figures of the
        whole server, and the twin confirms them for each adapter."""
        names = {*self.figures, *self.limits}
        if self.goal is not None and not _needs_requests(self.goal):
            names -= {"slo_used"}
        return names

    def within(self, goal: Goal | None) -> Self:
        """The same objective within a latency goal."""
        other = copy(self)
        object.__setattr__(other, "goal", goal)
        return other

    @property
    def stable(self) -> bool:
        """Whether no server of a plan may have a queue that grows for as long as requests come."""
        return False

    @property
    def spare(self) -> int:
        """Number of GPUs whose loss a plan must survive, 0 or 1."""
        return 0

    @property
    def figures(self) -> Collection[str]:
        """The figures of `Evaluations` that `limits` and `key` need, beyond whether a bin starves or does not start."""
        return self.limits

    @property
    def symmetric(self) -> bool:
        """Whether adapters of equal rank, rate and lengths can be exchanged for each other."""
        return True

    def supports(self, profiles: Sequence[Profile]) -> str | None:
        """Why it can't be used with these GPU types, for people, or None if it can."""
        return None

    def fleet(self, workload: Workload) -> Workload:
        """The fleet to plan, with the goal; an objective may change it, for instance add a fine-tuning job."""
        return workload if self.goal is None else replace(workload, slo=self.goal)

    def scenarios(self, workload: Workload) -> Sequence[Scenario]:
        """Loads at which every bin must hold, at least one; the first one gives the figures."""
        nominal = Scenario(workload)
        if not self.stable:
            return (nominal,)
        return (nominal, Scenario(workload, STABLE_FACTOR, f"at {STABLE_FACTOR:.2f} times the rates"))

    def anchored(self, old: Sequence[Bin]) -> Self:
        """The objective for a fleet that runs on these bins (in indices of its workload)."""
        return self

    def weight(self, profile: Profile) -> float:
        """What a server adds to the first entry of `key` if that entry is a sum: its price per hour, or its GPUs."""
        if self.minimises == "price":
            return profile.gpu.price_per_hour or 0.0
        return float(profile.engine.gpus)

    def holds(self, evaluations: Evaluations) -> BoolArray:
        """Which bins a plan may contain, bool (n,): not starved, no memory error, within the limits, and stable if the
        objective demands it. A server without requests keeps every limit. Raises `IncompatibleError`: the predictor
        does not give a required figure."""
        ok = feasible = evaluations.feasible
        if self.stable:
            ok = ok & evaluations.stable
        limits, required, idle = self.limits, self.required, evaluations.idle
        for key in dict.fromkeys((*self.figures, *limits)):
            figures = getattr(evaluations, key)
            within, unknown = (figures <= limits.get(key, np.inf)) | idle, np.isnan(figures)
            if key not in required:
                within |= unknown
            elif feasible.any() and (unknown & ~idle)[feasible].all():
                of = ""
                if self.goal is not None and key == "slo_used":
                    of = f" for the limits {', '.join(self.goal.every_key)}"
                raise IncompatibleError(f"The predictor gives no {key}{of}; take one that does (twin).")
            ok = ok & within
        return ok

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """The tuple by which complete plans are compared, smaller first: here the number of GPUs."""
        return (float(sum(item.gpus for item in bins)),)

    def keys(
        self, workload: Workload, plans: Sequence[Sequence[Bin]], evaluations: Evaluations
    ) -> list[tuple[float, ...]]:
        """`key` of each of m plans with n bins; every column of the evaluations is (m, n)."""
        rows = (Evaluations(*(getattr(evaluations, name)[k] for name in FIGURES)) for k in range(len(plans)))
        return [self.key(workload, bins, row) for bins, row in zip(plans, rows, strict=True)]

    def attained(self, key: tuple[float, ...], bound: float) -> bool:
        """Whether `key` is optimal, given that no plan has a first entry below `bound`."""
        return len(key) == 1 and key[0] <= bound + 1e-9


def load_objective(spec: str | Objective) -> Objective:
    """Return the objective that a text names: "gpus", or with parameters "gpus:stable=1".

    Limits among the parameters form its whole goal: "slo:mean_ttft_ms=500,p99_itl_ms=60".

    Raises `UnknownNameError`: no objective has that name; `ValidationError`: it has no such parameter, or the value
    breaks a rule; `IncompatibleError`: the object is not an `Objective`.
    """
    objective = _made(spec) if isinstance(spec, str) else spec
    if isinstance(objective, Objective):
        return objective
    rule = "Expected an objective to inherit from packer.objectives.base.Objective"
    raise IncompatibleError(f"{rule}, got {type(objective).__name__}.")


def _made(spec: str) -> Objective:
    name, _, text = spec.partition(":")
    parts = text.split(",") if text else []
    kind = registry.load("objective", name)
    known = [item.name for item in fields(kind) if item.init] if is_dataclass(kind) else []
    keys = {part: part.partition("=")[0].strip() for part in parts if "=" in part}
    limits = [part for part, key in keys.items() if key in (*KEYS, *SPELLINGS) and key not in known]
    others = [part for part in parts if part not in limits]
    for part in others:
        key, equals, _ = part.partition("=")
        if equals and key not in known:
            raise ValidationError(
                f"The objective {name!r} has no parameter {shown(key)}; it has: {', '.join(sorted(known)) or 'none'}, "
                f"and the limits {', '.join(OF_MANY + OF_REQUESTS)}, of a server as in server.p99_ttft_ms."
            )
    made: Objective = registry.make("objective", f"{name}:{','.join(others)}" if others else name)
    return made.within(Goal.only(assignments(",".join(limits)))) if limits else made


def limits_of(goal: Goal) -> dict[str, float]:
    """Limits on figures of `Evaluations`, by name, that a server must keep for the goal. A server limit bounds the
    figure of the same name. So does an adapter limit of a goal without classes: if all adapters keep it, their server
    does. `slo_used` <= 1 covers every limit that needs simulated requests."""
    whole, found = goal.limits.to_dict(), dict[str, float]()
    for key in (*goal.keys("server"), *(() if goal.classes else goal.keys("adapter"))):
        name = key.removeprefix("server.")
        if name in FIGURES:
            found[name] = min(whole[key], found.get(name, whole[key]))
    if goal.keys("adapter") or goal.keys("request") or len(goal.keys("server")) > len(found):
        found["slo_used"] = 1.0
    return found


_limits_of = Memo(limits_of)  # searches ask for the limits of the same goal many times


def needs_requests(goal: Goal) -> bool:
    """Whether at least one limit can only be checked by simulating requests."""
    keys = [key.removeprefix("server.") for key in (*goal.keys("adapter"), *goal.keys("server"))]
    by_class = bool(goal.classes and goal.keys("adapter"))
    return by_class or bool(goal.keys("request")) or any(key not in FIGURES for key in keys)


_needs_requests = Memo(needs_requests)
