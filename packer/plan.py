"""Plans: which adapter goes to which server, how each server starts, and a bound on the plan's quality. Files are read
and written by `packer.io.plans`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from packer.bin import Bin
from packer.cluster import Cluster, ServerKind
from packer.evaluation import AdapterFigures, Evaluations
from packer.profile import WEIGHTS, Profile
from packer.public import public
from packer.room import Room, growth
from packer.words import counted
from packer.workload import Workload

SAID = ("decision", "frontier", "kinds", "estimate_band", "within_goal", "limits", "evaluated", "duration_s")
"""Names that a file's "details" have beside the statistics of a solver."""


class Status(StrEnum):
    """Status of a plan."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"


@dataclass(frozen=True, slots=True)
class Moves:
    """What a plan changes on the running servers that it continues.

    `adapters`: indices of the adapters that leave the server where they run.
    `servers`: for each bin the number of the running server that it continues; None for a new one.
    """

    adapters: tuple[int, ...]
    servers: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Bins with their evaluations, status, bound and provenance. Immutable.

    `workload`: the fleet that the bins' indices refer to.
    `bins`: one per server; empty if the plan is infeasible and nothing was placed.
    `evaluations`: one row per bin. If the twin confirms plans, figures come from a simulated hour for up to 32 GPUs,
    and from the verification for larger plans with the fewest GPUs; otherwise from the predictor.
    `status`: "optimal" (proven, relative to the predictor), "feasible" or "infeasible".
    `objective`, `solver`, `predictor`: names of the strategies.
    `objective_value`: key of the objective by the predictor; compared lexicographically, smaller is better.
    `lower_bound`: lower bound on the first entry of the key, relative to the predictor; None if unknown.
    `bound_proven`: true if the bound is proven relative to the predictor; false if a search merely failed to refute it.
    `bound_source`: the argument that gave the bound, in words.
    `margin`: relative increase of every rate in the search, 0.05 for 5 %; None if the search used no margin.
    `headroom`: factor by which each bin's rates may grow: that of its room, whatever is given, or the factor up to
    which the predictor says that the bin does not starve. None if the bin fails at the given rates or nothing is known;
    empty if not computed.
    `rooms`: for each bin, the factor up to which its latency limits hold, no queue grows and it does not starve, and
    what limits it; empty if not computed.
    `adapters`: figures of each adapter of the workload; None if the plan was not simulated.
    `moves`: changes to running servers; None if the plan continues none.
    `interrupted`, `time_limit_reached`: whether the user or the time limit ended the search early.
    `reasons`: why the plan is infeasible and what would help, in words; also notes on a feasible plan.
    `unplaced`: indices of the adapters that have no bin (infeasible plans only).
    `verified`: whether the twin confirms the plan with seeds that no search has used; None if it was not verified.
    `runtime_s`: wall-clock time of the solver.
    `seed`: the seed from which all random numbers derive.
    `versions`: versions of packer and of everything else that determines the result.
    `limits`: limits that each server must keep, by name of the figure (`FIGURES`); empty if the plan has none.
    `decision`: what the plan says to an engineer, a few lines of which the first is the answer; "" if it says nothing.
    `frontier`: latency and price of each number of GPUs that was simulated, rows of `FrontierPoint.to_dict`.
    `kinds`: GPUs and price with each kind of server, or a mix of kinds, rows of `Option.to_dict`.
    `estimate_band`: how the error of estimated profiles changes the answer: "fewest" and "most", each with a capacity
    relative to the estimate, GPUs and the objective's value; empty for measured profiles.
    `within_goal`: an objective that keeps the fleet's latency limits, and its GPUs; empty unless the plan breaks them.
    `evaluated_s`: seconds for which the twin evaluated a plan that is not from a search; 0 for its usual time, None
    for a plan that is from a search.
    `statistics`: statistics of the solver, JSON-able.
    """

    workload: Workload
    bins: tuple[Bin, ...]
    evaluations: Evaluations
    status: Status
    objective: str
    solver: str
    predictor: str
    objective_value: tuple[float, ...] = ()
    lower_bound: float | None = None
    bound_proven: bool = False
    bound_source: str = ""
    margin: float | None = None
    headroom: tuple[float | None, ...] = ()
    rooms: tuple[Room, ...] = ()
    adapters: AdapterFigures | None = None
    moves: Moves | None = None
    interrupted: bool = False
    time_limit_reached: bool = False
    reasons: tuple[str, ...] = ()
    unplaced: tuple[int, ...] = ()
    verified: bool | None = None
    runtime_s: float = 0.0
    seed: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    decision: str = ""
    frontier: tuple[Mapping[str, Any], ...] = ()
    kinds: tuple[Mapping[str, Any], ...] = ()
    estimate_band: Mapping[str, Any] = field(default_factory=dict)
    within_goal: Mapping[str, Any] = field(default_factory=dict)
    evaluated_s: float | None = None
    statistics: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rooms:  # one source, also where a search ended between the two
            object.__setattr__(self, "headroom", tuple(room.headroom for room in self.rooms))

    def __repr__(self) -> str:
        said = self.decision.partition("\n")[0] or f"GPUs: {self.n_gpus}, solver: {self.solver}"
        return f"<Plan of {self.workload.name!r} for {self.objective}, {self.status.value}: {said}>"

    @property
    def details(self) -> dict[str, Any]:
        """What the plan's file has as "details": the statistics, and what the plan says by its fields, if anything."""
        told = {name: value for name in SAID if (value := getattr(self, name, None))}
        if self.evaluated_s is not None:
            told |= {"evaluated": True, "duration_s": self.evaluated_s or None}
        return {**self.statistics, **told}

    @property
    def goal(self) -> str:
        """The goal of the plan in words: its limits, or the name of its objective."""
        if "slo_used" in self.limits:
            return str(self.workload.slo)
        own = [f"{name} <= {most:g}" for name, most in self.limits.items()]
        return f"{self.objective}: {', '.join(own)}" if own else self.objective

    @property
    def n_gpus(self) -> int:
        """Number of GPUs used; each GPU of a tensor-parallel group counts."""
        return sum(item.gpus for item in self.bins)

    @property
    def spare(self) -> int:
        """1 if the plan was made to hold when any one server is lost, else 0."""
        return int(self.statistics.get("spare") == 1)

    @property
    def price_per_hour(self) -> float | None:
        """Price of all servers, US dollars per hour; None if a server has no price."""
        prices = [item.profile.gpu.price_per_hour for item in self.bins]
        return None if None in prices else sum(price or 0.0 for price in prices)

    @property
    def headroom_words(self) -> list[str]:
        """The headroom of each server in words: "none" if there is none, a dash if it was not computed."""
        factors = self.headroom or (None,) * len(self.bins)
        return [
            growth(factor) if factor is not None or self.rooms or not row.feasible else "–"
            for factor, row in zip(factors, self.evaluations, strict=True)
        ]

    @property
    def hardware(self) -> str:
        """The servers in words: "2 × H100 64GB (Llama-3.1-8B-Instruct, vLLM 0.8.5; lengths assumed)"."""
        found, some = [], self.workload.assuming
        whose = "" if some == len(self.workload) else f" of {counted(some, 'adapter')}"
        for profile, servers in Counter(item.profile for item in self.bins).items():
            size, model = profile.engine.gpus, profile.model
            gpus = f"{servers * size} × {profile.gpu.name.removeprefix('NVIDIA ').removeprefix('AMD ')}"
            gpus += f" as {counted(servers, 'server')} of {size}" if size > 1 else ""
            engine = profile.engine.name.replace("vllm", "vLLM")
            named = (model.repository or model.name).rpartition("/")[2]
            stored = profile.engine.quantization or profile.provenance.get(WEIGHTS, "").partition(",")[0]
            named += f" in {stored}" if stored else ""
            notes = f"; lengths{whose} assumed" if some else ""
            notes += "" if profile.calibrated else "; estimated"
            notes += "; started warm" if profile.engine.warm_start else ""
            found.append(f"{gpus} ({named}, {engine} {profile.engine.version}{notes})")
        return " and ".join(found) or counted(0, "GPU")

    @property
    def found_in_time(self) -> bool:
        """False if the search ended early without a plan, so that a feasible plan may still exist."""
        return self.status is not Status.INFEASIBLE or not (self.time_limit_reached or self.interrupted)

    @property
    def outcome(self) -> str:
        """The status in words."""
        return self.status.value if self.found_in_time else "no plan found in time"

    @property
    def gap(self) -> float | None:
        """(value − bound) / value of the first entry of the key, in [0, 1]; None without a bound."""
        if self.lower_bound is None or not self.objective_value or self.status is Status.INFEASIBLE:
            return None
        value = self.objective_value[0]
        return max(0.0, (value - self.lower_bound) / value) if value > 0 else 0.0

    def cluster(self) -> Cluster:
        """The plan's servers as a cluster; with the router `plan` the cluster routes as planned."""
        kinds: dict[tuple[Profile, int, int], ServerKind] = {}
        for item in self.bins:
            key = (item.profile, item.max_loras, item.max_lora_rank)
            name = f"{item.profile.name}, {counted(item.max_loras, 'slot')} of rank {item.max_lora_rank}"
            while any(kind.name == name for other, kind in kinds.items() if other != key):
                name += "'"
            kinds.setdefault(key, ServerKind(name, *key))
        names = self.workload.names
        placed = (zip(item.adapters, item.shares, strict=True) for item in self.bins)
        placement = tuple({names[i]: share for i, share in own} for own in placed)
        servers = tuple(kinds[item.profile, item.max_loras, item.max_lora_rank].name for item in self.bins)
        return Cluster(tuple(kinds.values()), servers, placement)

    @public
    def save(self, path: str | os.PathLike[str], *, force: bool = True) -> None:
        """Write the plan as JSON, atomically; with `force` False an existing file is an error."""
        from packer.io.plans import write_plan

        write_plan(self, path, force=force)
