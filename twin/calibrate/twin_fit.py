"""Second fit: the step law so that the twin's own metrics match those of real runs.

Residuals are log ratios of simulated and measured metrics, each divided by the error that is expected of it, so
that they can be added; a soft-L1 loss keeps single runs from deciding. Micro-benchmarks stay in as equations of the
step law: they hold the terms that whole runs can't tell apart. The random draws are the same in every evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from packer.profile import LINEAR_TERMS, Profile
from packer.twin.calibrate.runs import fleet_of
from packer.twin.calibrate.step_law import Equations
from packer.twin.calibrate.tables import Run
from packer.twin.simulate import Simulation, simulate
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]

EXPECTED_ERROR = {
    "throughput": 0.03,
    "tpot": 0.05,
    "ttft": 0.12,
    "ttft_median": 0.30,
}
"""Scale of the log ratios of each metric: what a good twin leaves (TTFT where requests queue, its median where not)."""
MICRO_ERROR = 0.06
MICRO_WEIGHT = 0.5
LARGEST = 1.5
"""Log ratios are cut there: near the edge a queue of seconds may be one of minutes."""


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


def compared(run: Run, sim: Simulation) -> dict[str, tuple[float, float]]:
    """(simulated, measured) of the metrics that count in this run's regime."""
    pairs = {
        "throughput": (sim.total_token_throughput, run.metrics.get("total_tok_s")),
        "tpot": (sim.mean_tpot_ms, run.metrics.get("tpot_mean_ms")),
    }
    if run.regime == "light":
        pairs["ttft_median"] = (sim.median_ttft_ms, run.metrics.get("ttft_median_ms"))
    else:
        pairs["ttft"] = (sim.mean_ttft_ms, run.metrics.get("ttft_mean_ms"))
    return {
        name: (simulated, measured)
        for name, (simulated, measured) in pairs.items()
        if measured and simulated > 0 and np.isfinite(simulated)
    }


def residuals_of(target: Target, profile: Profile, max_outstanding: int | None) -> FloatArray:
    """Scaled log ratios of one run, (3,); 0 where nothing can be compared."""
    pairs = compared(target.run, simulate_target(target, profile, max_outstanding))
    ttft = "ttft_median" if target.run.regime == "light" else "ttft"
    out = np.zeros(3)
    for i, name in enumerate(("throughput", "tpot", ttft)):
        if name in pairs:
            ratio = np.log(pairs[name][0] / pairs[name][1])
            out[i] = np.clip(ratio, -LARGEST, LARGEST) / EXPECTED_ERROR[name]
    return out


@dataclass(frozen=True, eq=False)
class Problem:
    """What is fitted: which terms, on which targets and equations, from which profile."""

    profile: Profile
    terms: tuple[str, ...]
    targets: tuple[Target, ...]
    micro: Equations
    max_outstanding: int | None
    threads: int

    def with_values(self, values: FloatArray) -> Profile:
        """The profile with these coefficients, ms."""
        return self.profile.with_coefficients(**dict(zip(self.terms, values.tolist(), strict=True)))

    def residuals(self, values: FloatArray) -> FloatArray:
        """All residuals: three per run, then one per micro-benchmark."""
        profile = self.with_values(values)
        with ThreadPoolExecutor(self.threads) as pool:  # the kernel releases the GIL
            rows = list(pool.map(lambda t: residuals_of(t, profile, self.max_outstanding), self.targets))
        return np.concatenate([*rows, self._micro(values)])

    def _micro(self, values: FloatArray) -> FloatArray:
        if not len(self.micro.step_ms):
            return np.zeros(0)
        columns = [LINEAR_TERMS.index(term) for term in self.terms]
        relative = self.micro.features[:, columns] @ values / self.micro.step_ms - 1.0
        share = MICRO_WEIGHT * len(self.targets) / len(relative)
        out: FloatArray = relative / MICRO_ERROR * np.sqrt(share)
        return out


def soft_l1(residuals: FloatArray) -> float:
    """Robust loss, mean over residuals."""
    return float(np.mean(2.0 * (np.sqrt(1.0 + residuals**2) - 1.0)))


def fit(
    problem: Problem,
    *,
    iterations: int = 4,
    step: float = 0.06,
    progress: Callable[[float], None] = lambda _loss: None,
) -> Profile:
    """Levenberg-Marquardt on the logarithms of the coefficients, with soft-L1 weights.

    Derivatives are differences over `step` (relative), wide enough to see through the steps of a simulation.
    Terms that the first fit set to 0 stay out. `progress` is called after each evaluation with the best loss.
    """
    values = np.array([problem.profile.latency.coefficients.get(term, 0.0) for term in problem.terms])
    kept = values > 0
    problem = replace(problem, terms=tuple(np.array(problem.terms)[kept].tolist()))
    x = np.log(values[kept])
    here = problem.residuals(np.exp(x))
    best, damping = soft_l1(here), 0.3
    progress(best)
    for _ in range(iterations):
        jacobian = np.empty((len(here), len(x)))
        for j in range(len(x)):
            moved = x.copy()
            moved[j] += step
            jacobian[:, j] = (problem.residuals(np.exp(moved)) - here) / step
            progress(best)
        weight = 1.0 / np.sqrt(1.0 + here**2)
        normal = jacobian.T @ (jacobian * weight[:, None])
        gradient = jacobian.T @ (here * weight)
        improved = False
        for _try in range(5):
            ridge = np.diag(damping * (np.diag(normal) + 0.02 * np.trace(normal) / len(x)))
            change = np.clip(np.linalg.solve(normal + ridge, -gradient), -0.7, 0.7)
            there = problem.residuals(np.exp(x + change))
            loss = soft_l1(there)
            progress(min(best, loss))
            if loss < best:
                improved = True
                gain = best - loss
                x, here, best, damping = x + change, there, loss, damping / 3
                break
            damping *= 3
        if not improved or gain < 0.002 * best:
            break
    return problem.with_values(np.exp(x))
