"""Placements of the main paper's comparison (arXiv 2602.24044, section 8.4), each simulated for an hour."""

from __future__ import annotations

import time
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np

import packer
from packer import registry
from packer.evaluation import Evaluations
from packer.objectives.base import load_objective
from packer.predictors.twin import TwinPredictor
from packer.profile import Profile
from packer.solvers.base import Problem, Solution
from packer.solvers.evaluator import Evaluator
from packer.workload import Workload

LLAMA, QWEN = "h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"
GPUS = 4
RATES = {
    "high": (2.4, 1.2, 0.6, 0.3, 0.15),
    "low": (0.075, 0.0375, 0.01875, 0.009375, 0.0046875),
    "mixed": (0.6, 0.3, 0.15, 0.075, 0.0375),
}
RANKS = {"8": (8,), "32": (32,), "8–32": (8, 16, 32)}


@dataclass(frozen=True)
class Method:
    """A placement: solver, predictor of its search, and whether it spreads over all GPUs."""

    name: str
    solver: str
    predictor: str
    spreads: bool
    fails: bool = False


METHODS = (
    Method("Proposed", "greedy-paper", "forest", spreads=False),
    Method("ProposedFast", "greedy-paper", "tree", spreads=False),
    Method("packer", "greedy", "auto", spreads=False),
    Method("MaxBase", "maxbase", "boosting", spreads=False, fails=True),
    Method("MaxBase*", "maxbase-half", "boosting", spreads=False, fails=True),
    Method("Random", "random", "boosting", spreads=True, fails=True),
    Method("dLoRA", "dlora", "boosting", spreads=True, fails=True),
    Method("ProposedLat", "proposed-lat", "boosting", spreads=True),
    Method("Dynamo, hashing", "hrw", "boosting", spreads=True, fails=True),
    Method("Dynamo, flow", "flow", "boosting", spreads=True, fails=True),
)


@dataclass(frozen=True)
class Scenario:
    """Fleets of growing size: rates and ranks drawn at random from these sets.

    `reach`: most adapters that Proposed serves by the text on Figure 11; None: it does not say. `further`: whether it
    serves more than the baselines there; otherwise Random does, with 160 adapters.
    """

    profile: str
    rates: str
    ranks: str
    sizes: tuple[int, ...]
    reach: int | None = None
    further: bool = True

    @property
    def name(self) -> str:
        """How rows call it."""
        model = "Llama" if self.profile == LLAMA else "Qwen"
        return f"{model}, {self.rates} rates, ranks {self.ranks}"

    def fleet(self, adapters: int, seed: int) -> Workload:
        """One fleet."""
        rng = np.random.default_rng((seed, adapters))
        rates, ranks = RATES[self.rates], RANKS[self.ranks]
        return Workload(
            [packer.Adapter(f"a{i}", int(rng.choice(ranks)), float(rng.choice(rates))) for i in range(adapters)]
        )


SCENARIOS = (
    Scenario(QWEN, "mixed", "8–32", (64, 128, 256, 384)),
    Scenario(QWEN, "low", "8", (320, 640, 1280, 1600), 1280),
    Scenario(LLAMA, "mixed", "32", (64, 128, 192, 320), 128),
    Scenario(LLAMA, "high", "8–32", (32, 64, 128, 160), 128, further=False),
)


@dataclass(frozen=True)
class Outcome:
    """One placement, simulated: `gpus` None if it is infeasible (adapters unplaced, starvation, memory error)."""

    gpus: int | None
    itl_ms: float
    seconds: float
    refused: bool
    predictions: int = 0


def placed(method: Method, fleet: Workload, profile: Profile, seed: int) -> tuple[Solution, float]:
    """What the method places on at most four GPUs, and its CPU time, s."""
    goal = load_objective("latency" if method.spreads else "gpus")
    solver = registry.load("solver", method.solver)()
    evaluator = Evaluator.load(method.predictor, (profile,), seed=seed, objective=goal)
    problem = Problem(fleet, (profile,), goal, evaluator, max_gpus=GPUS, seed=seed)
    started = time.process_time()
    solution = solver.solve(problem)
    return solution, time.process_time() - started


def predictions(method: Method, fleet: Workload, profile: Profile, seed: int) -> int:
    """Servers whose figures the method's search predicts; counted apart, so that counting takes no measured time."""
    with patch.object(Evaluator, "evaluate", autospec=True, side_effect=Evaluator.evaluate) as calls:
        placed(method, fleet, profile, seed)
    return sum(len(call.args[2]) for call in calls.call_args_list)


def outcome(method: Method, scenario: Scenario, adapters: int, seed: int, twin: TwinPredictor) -> Outcome:
    """Place, and simulate every server for an hour."""
    fleet, profile = scenario.fleet(adapters, seed), packer.load_profile(scenario.profile)
    solution, seconds = placed(method, fleet, profile, seed)
    count = predictions(method, fleet, profile, seed) if method.name.startswith("Proposed") else 0
    if solution.unplaced or not solution.bins:
        return Outcome(None, np.nan, seconds, refused=True, predictions=count)
    found: Evaluations = twin.evaluate(fleet, solution.bins)
    if not found.feasible.all():
        return Outcome(None, np.nan, seconds, refused=False, predictions=count)
    weights = [bin_.rates(fleet).sum() for bin_ in solution.bins]
    itl = float(np.average(found.mean_itl_ms, weights=weights))
    return Outcome(len(solution.bins), itl, seconds, refused=False, predictions=count)


Found = dict[tuple[str, str, int], list[Outcome]]


def outcomes(seeds: int) -> Found:
    """(scenario, method, adapters) → an outcome of each seed."""
    found: Found = {}
    for scenario in SCENARIOS:
        for adapters in scenario.sizes:
            for seed in range(seeds):
                twin = TwinPredictor(seed=1000 + seed, workers=2)
                for method in METHODS:
                    result = outcome(method, scenario, adapters, seed, twin)
                    found.setdefault((scenario.name, method.name, adapters), []).append(result)
    return found


def largest(method: Method, scenario: Scenario, seed: int) -> int:
    """Most adapters, in steps of 32 from the scenario's largest fleet, that the method places so that they hold."""
    twin, adapters = TwinPredictor(seed=1000 + seed, workers=2), scenario.sizes[-1]
    while outcome(method, scenario, adapters, seed, twin).gpus is not None:
        adapters += 32
    return adapters - 32
