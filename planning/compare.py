"""Solvers, objectives and predictors side by side on one workload, all simulated by the twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from packer import checks, registry
from packer.bin import Bin
from packer.errors import InputError, ModelError, VerificationError
from packer.evaluation import Evaluations, mean_of
from packer.objectives.base import load_objective
from packer.plan import Plan, Status
from packer.planning.solve import solve
from packer.planning.verify import twin_failures
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.seeds import fresh
from packer.twin.sweep import fleet_of
from packer.workload import Workload


@dataclass(frozen=True)
class PlanFigures:
    """Figures of a plan from one source ("twin", "vllm", a predictor): mean TTFT over requests, mean ITL over gaps."""

    source: str
    total_token_throughput: float
    mean_ttft_ms: float
    mean_itl_ms: float
    starved: int
    memory_errors: int
    late: int = 0  # Servers that serve their load with a mean TTFT beyond the fleet's limit.

    @classmethod
    def of(cls, source: str, workload: Workload, bins: Sequence[Bin], found: Evaluations) -> PlanFigures:
        """The sums and means of a plan's evaluations."""
        starts = ~found.memory_error
        return cls(
            source,
            float(found.total_token_throughput.sum()),
            mean_of(found.mean_ttft_ms, starts * [item.requests_s(workload) for item in bins]),
            mean_of(found.mean_itl_ms, starts * [item.gaps_s(workload) for item in bins]),
            int((found.starved & starts).sum()),
            int(found.memory_error.sum()),
            int((found.feasible & (found.mean_ttft_ms > workload.slo.limits.p95_ttft_ms)).sum()),
        )


@dataclass(frozen=True)
class Result:
    """The result of one combination: its plan with predicted and reference figures, or why there is none. `refused`:
    why the choices don't fit together. `failed`: the error of a combination that should have worked."""

    adapters: int
    objective: str
    solver: str
    predictor: str
    plan: Plan | None = None
    predicted: PlanFigures | None = None
    reference: PlanFigures | None = None
    refused: str = ""
    failures: tuple[str, ...] = ()
    failed: str = ""

    @property
    def outcome(self) -> str:
        """ "ok", or what is wrong, according to the reference if there is one."""
        if self.plan is None:
            return f"failed: {self.failed}" if self.failed else f"refused: {self.refused}"
        wrong = [*self.failures]
        seen = self.reference or self.predicted
        if seen is not None and seen.memory_errors:
            wrong.append(f"memory error on {seen.memory_errors}")
        if seen is not None and seen.starved:
            wrong.append(f"starved on {seen.starved}")
        if self.plan.unplaced:
            wrong.append(f"{len(set(self.plan.unplaced))} unplaced")
        if not wrong and self.plan.status is Status.INFEASIBLE:
            wrong.append("infeasible by the predictor")
        if not wrong and seen is not None and seen.late:
            wrong.append(f"TTFT beyond the limit on {seen.late}")
        return ", ".join(wrong) or "ok"

    def to_dict(self) -> dict[str, Any]:
        """A flat row."""
        names = ("adapters", "objective", "solver", "predictor", "outcome")
        row: dict[str, Any] = {name: getattr(self, name) for name in names}
        plan = self.plan
        row["gpus"] = plan.n_gpus if plan else None
        row["status"] = plan.status.value if plan else "failed" if self.failed else "refused"
        row |= {name: getattr(plan, name, None) for name in ("lower_bound", "gap", "runtime_s")}
        for name, figures in (("predicted", self.predicted), ("reference", self.reference)):
            for key in ("total_token_throughput", "mean_ttft_ms", "mean_itl_ms", "starved", "memory_errors"):
                row[f"{name}_{key}"] = getattr(figures, key) if figures else None
        row["reference"] = self.reference.source if self.reference else None
        return row


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    `workload`, `profile`: the fleet and the server.
    `solvers`, `objectives`, `predictors`: names; every combination is run.
    `sizes`: numbers of adapters; beyond the fleet's own, its adapters are drawn again. Empty: the fleet as it is.
    `max_gpus`: as for `solve`. Without it, solvers that spread over given GPUs get as many as `greedy` needs
        for the objective.
    `options`: more keyword arguments of `packer.planning.solve.solve`.
    """

    workload: Workload
    profile: Profile
    solvers: Sequence[str]
    objectives: Sequence[str] = ("gpus",)
    predictors: Sequence[str] = ("twin",)
    sizes: Sequence[int] = ()
    max_gpus: int | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.solvers:
            registry.load("solver", name)
        for spec in self.objectives:
            load_objective(spec)
        for n in self.sizes:
            checks.integer("a number of adapters", n, low=1, high=1_000_000)

    def __len__(self) -> int:
        sizes = len(self.sizes) or 1
        return sizes * len(self.objectives) * len(self.predictors) * len(self.solvers)

    def fleets(self) -> Iterator[Workload]:
        """The fleet at each size."""
        if not self.sizes:
            yield self.workload
        for n in self.sizes:
            yield fleet_of(self.workload, n, self.seed)

    def run(self, progress: Progress = silent) -> Iterator[Result]:
        """Yield the result of each combination. The reference is the twin with a fresh seed."""
        done = 0
        for fleet in self.fleets():
            for predictor in self.predictors:
                common = {"predictor": predictor, "seed": self.seed, "verify": False, **self.options}
                solved = cache(partial(solve, fleet, self.profile, **common))  # `greedy` may be one of the solvers
                for objective in self.objectives:
                    for solver in self.solvers:
                        progress(f"{solver} ({len(fleet)} adapters)", done, len(self))
                        yield self._one(fleet, objective, solver, predictor, solved)
                        done += 1

    def _one(self, fleet: Workload, objective: str, solver: str, predictor: str, solved: Callable[..., Plan]) -> Result:
        spreads = getattr(registry.load("solver", solver), "spreads", False)
        result = Result(len(fleet), objective, solver, predictor)
        try:
            goal = load_objective(objective)
            # A solver that chooses the number of GPUs minimises it; its latency is compared all the same.
            fewest = "gpus" if goal.fixed_gpus else objective
            gpus = self.max_gpus
            if gpus is None and (goal.fixed_gpus or spreads):
                packed = solved(fewest, solver="greedy", max_gpus=None)
                if packed.status is Status.INFEASIBLE:
                    packed = solved("gpus", solver="greedy", max_gpus=None)
                gpus = max(1, packed.n_gpus)
            aim = objective if spreads else fewest
            plan = solved(aim, solver=solver, max_gpus=gpus)
        except (ModelError, VerificationError) as error:
            # A failed combination must not end the comparison.
            return replace(result, failed=str(error))
        except InputError as error:
            return replace(result, refused=str(error))
        if not plan.bins:
            return replace(result, plan=plan)
        twin = TwinPredictor(seed=fresh(self.seed))
        reference = PlanFigures.of("twin", fleet, plan.bins, twin.evaluate(fleet, plan.bins))
        predicted = PlanFigures.of(predictor, fleet, plan.bins, plan.evaluations)
        failing = twin_failures(fleet, plan.bins, twin=twin, objective=goal)
        plan, failures = replace(plan, verified=not failing), _beyond(reference, len(failing), goal.name)
        return replace(result, plan=plan, predicted=predicted, reference=reference, failures=failures)


def _beyond(reference: PlanFigures, failing: int, objective: str) -> tuple[str, ...]:
    """How many servers fail that neither starve nor run out of memory at the rates as given, in words."""
    others = failing - reference.starved - reference.memory_errors
    return (f"breaks {objective} on {others}",) if others > 0 else ()
