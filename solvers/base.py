"""What a solver is, and the problem it is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from packer import checks, registry
from packer.bin import Bin
from packer.errors import ValidationError
from packer.objectives.base import Objective
from packer.plan import Moves
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.solvers.evaluator import Evaluator
from packer.workload import Workload

MAX_LORAS_CANDIDATES = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
"""Values of `max_loras` that solvers try; also the testing points of arXiv 2602.24044, Algorithm 1."""

MAX_ADAPTERS_PER_GPU = 100_000
"""No solver puts more adapters on a GPU, which keeps arrays small. The predictor decides how many a server
can hold; plans mark servers beyond `Profile.measured_adapters` (`packer.solvers.candidates.beyond_measured`)."""


LEAST_S = 0.05  # Least time limit of a search, s: enough for its first step to give a plan, even if no time is left.


def limit_of(left_s: float) -> float | None:
    """The time limit, s, of a search when `left_s` are left: at least `LEAST_S`; None if `left_s` is infinite."""
    return None if left_s == math.inf else max(LEAST_S, left_s)


class Clock:
    """A search that ends with the best plan so far. `started`: `now()` at its start. `time_limit_s`: wall-clock limit,
    None for none. `stop`: called between steps: True means that it ends (Ctrl-C)."""

    started: float
    time_limit_s: float | None
    stop: Callable[[], bool]

    def now(self) -> float:
        """The clock's time, s."""
        return time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.now() - self.started

    def remaining_s(self) -> float:
        """Seconds left before the time limit; infinite without one."""
        return math.inf if self.time_limit_s is None else self.time_limit_s - self.elapsed_s()

    def out_of_time(self) -> bool:
        """Whether to return the best plan so far: the limit has passed, or `stop` says so."""
        return self.stop() or self.remaining_s() <= 0


@dataclass(frozen=True)
class Problem(Clock):
    """The input of a solver.

    `workload`: the fleet.
    `profiles`: kinds of server to choose from, the first one is the default.
    `objective`: what is minimised, and what a plan may contain.
    `evaluator`: evaluates bins, at the objective's loads and with the margin.
    `max_gpus`: limit on the GPUs, None for no limit; with a `fixed_gpus` objective, and for solvers that spread, the
    number of servers.
    `stock`: number of GPUs available by name (`profile.gpu.name`); GPUs that it does not name are unlimited.
    `max_replicas`: largest number of GPUs over which one adapter may be split.
    `most_adapters`: largest number of adapters that searches put on a GPU.
    `seed`: seed of everything random.
    `time_limit_s`, `started`, `stop`: see `Clock`.
    `counted`: the clock counts the evaluator's work, not time, so that a search ends at the same point on any machine.
    `old_bins`: a running plan to stay close to (objective "moves").
    `progress`: called with (what, done, total) now and then; total 0 means unknown.
    """

    workload: Workload
    profiles: tuple[Profile, ...]
    objective: Objective
    evaluator: Evaluator
    max_gpus: int | None = None
    stock: Mapping[str, int] = field(default_factory=dict)
    max_replicas: int = 1
    most_adapters: int = MAX_ADAPTERS_PER_GPU
    seed: int = 0
    time_limit_s: float | None = None
    started: float = field(default_factory=time.monotonic)
    old_bins: tuple[Bin, ...] = ()
    progress: Progress = silent
    stop: Callable[[], bool] = lambda: False
    counted: bool = False

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValidationError("Expected at least one profile.")
        if self.max_gpus is not None:
            checks.integer("the number of GPUs", self.max_gpus, low=1)
        elif self.objective.fixed_gpus:
            raise ValidationError(f"The objective {self.objective.name!r} needs the number of GPUs (--gpus).")
        for each in self.profiles:
            name = f"the weight of {each.name} by the objective {self.objective.name!r}"
            checks.real(name, self.objective.weight(each), low=0.0)
        checks.integer("max_replicas", self.max_replicas, low=1)
        checks.integer("seed", self.seed, low=0)
        checks.time_limit(self.time_limit_s)

    @property
    def profile(self) -> Profile:
        """The default GPU type."""
        return self.profiles[0]

    def learned(self) -> Problem:
        """The problem with `most_adapters` low enough that searches need not simulate every server."""
        most = self.evaluator.most_learned
        return self if self.most_adapters <= most else replace(self, most_adapters=most)

    def with_share(self, share: float) -> Problem:
        """The problem with this share of the remaining time as its time limit."""
        if self.time_limit_s is None:
            return self
        return replace(self, time_limit_s=self.time_limit_s - (1.0 - share) * max(0.0, self.remaining_s()))

    def now(self) -> float:
        """The time, s: of the work counted so far, or of the wall clock."""
        return self.evaluator.work.done_s if self.counted else super().now()

    @property
    def wall_s(self) -> float:
        """Wall-clock seconds left; infinite without a limit on them."""
        return math.inf if self.counted else self.remaining_s()

    def within(self, seconds: float) -> Problem:
        """The problem with a limit of so many seconds of counted work from now, unless it has a limit."""
        if self.time_limit_s is not None:
            return self
        return replace(self, time_limit_s=seconds, started=self.evaluator.work.done_s, counted=True)


@dataclass(frozen=True)
class Solution:
    """What a solver found; `packer.planning.solve` verifies it and makes the `Plan`.

    `lower_bound`: no plan has a smaller first entry of the objective's key: GPUs, of which a server may have several,
    or price per hour. `bound_source`: the argument in words.
    `proven`: the lower bound is certain relative to the predictor; otherwise a search only failed to refute it. Only
    a plan that meets a proven bound can be called optimal.
    """

    bins: tuple[Bin, ...]
    unplaced: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    lower_bound: float | None = None
    bound_source: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    proven: bool = False
    moves: Moves | None = None


@dataclass(frozen=True)
class Bound:
    """No plan has a smaller first entry of the objective's key than `value`: GPUs, or their price per hour. `source`:
    the argument in words. `proven`: it holds relative to what evaluates the plan; else it is an estimate."""

    value: float
    source: str
    proven: bool = False


def used_gpus(bins: Iterable[Bin]) -> dict[str, int]:
    """Number of GPUs that the servers use, by the name of the GPU."""
    used: dict[str, int] = {}
    for item in bins:
        used[item.profile.gpu.name] = used.get(item.profile.gpu.name, 0) + item.gpus
    return used


@runtime_checkable
class Solver(Protocol):
    """A search for a plan. `name` is what the command line calls it.

    A solver may declare `joint` = True: it takes several base models at once; `spreads` = True: it spreads over all the
    GPUs that are given, whatever is minimised; or `compared` = True: with replicas, its mix of several kinds of server
    is compared with its plans of one kind.
    """

    name: str

    def supports(self, problem: Problem) -> str | None:
        """Why this solver can't take the problem, for people, or None if it can."""

    def solve(self, problem: Problem) -> Solution:
        """Best bins found; adapters without a bin go to `unplaced`, with reasons."""


def start_refused(problem: Problem, solver: str) -> str | None:
    """Why the solver with which `start` begins can't take the problem, or None if it can."""
    first: Solver = registry.load("solver", solver)()
    return first.supports(problem)


def start(problem: Problem, solver: str = "greedy") -> Solution:
    """The solution of another solver; `max_gpus` is ignored unless the objective fixes the number of GPUs."""
    first: Solver = registry.load("solver", solver)()
    if not problem.objective.fixed_gpus:
        problem = replace(problem, max_gpus=None)
    return first.solve(problem)
