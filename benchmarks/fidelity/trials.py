"""Trials of effects: `uv run python benchmarks/fidelity/trials.py` writes benchmarks/fidelity/trials.json.

Terms of the step law: the relative error of a run's mean step time, by non-negative least squares fitted on the other
families of runs, with the term against without it. Workload and server: the twin's errors on a spread of 70 runs
with the effect against without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from h100 import MAX_OUTSTANDING, MODELS, SCRAPE_INTERVAL_S, tables
from scipy.optimize import brentq, fsolve
from scipy.special import gammainc, gammaincc

from packer.adapter import Adapter
from packer.fit import score, step_law
from packer.fit.lengths_fit import held_tokens
from packer.fit.mean_state import simulated_equations, solve_robustly
from packer.fit.pipeline import SEED, TERMS
from packer.fit.runs import fleet_of, stratified
from packer.fit.tables import MeasuredRun
from packer.io.files import write_text
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import Profile
from packer.testing.records import record_text
from packer.twin.scores import smape
from packer.twin.simulate import simulate
from packer.workload import SHAREGPT_CORRELATION, Workload

HERE = Path(__file__).parent
ONE = (Adapter("a", rank=8, rate=1.0),)
LONGEST = 1024
"""Tokens: the measured prompts were no longer; prompt and output together had at most 2,048."""
USED = {
    "slots cost per step": ("per_slot_ms", "per_slot_token_ms"),
    "rank of the slots costs per step": ("per_slot_rank_ms",),
    "first adapter, LoRA cost per token": ("first_adapter_ms", "per_lora_token_ms"),
    "adapters cost per token of the batch": ("per_adapter_token_ms",),
    "registry copied for each adapter of the batch": ("per_adapter_registered_ms",),
    "KV tokens read": ("per_kv_token_ms",),
    "tokens beyond the captured graphs": ("per_token_beyond_graph_ms",),
    "every waiting request costs": ("per_waiting_ms",),
    "launch grids of the LoRA kernels": ("per_slot_block_ms", "per_adapter_block_ms"),
}
NOT_USED = {
    "a jump beyond the captured graphs": ("beyond_graph_step_ms",),
    "a jump of steps with a prefill": ("prefill_step_ms",),
    "adapters cost per rank": ("per_rank_ms",),
    "rank of the slots costs per token": ("per_slot_rank_token_ms",),
}


def measured_profile(model: str) -> Profile:
    """The shipped profile, its `/metrics` read as in the measured runs."""
    profile = load_profile(f"h100-64gb/{model}")
    return replace(profile, frontend=replace(profile.frontend, scrape_interval_s=SCRAPE_INTERVAL_S))


def left_out_error(model: str, terms_of: Callable[[], tuple[str, ...]], cache: dict[str, tuple]) -> float:
    """Mean relative error, %, of step times of families that the fit has not seen."""
    if model not in cache:
        profiling, runs = tables(model)
        started = [run for run in runs if run.ok]
        profile = measured_profile(model)
        equations, kept = simulated_equations(profile, started, seed=SEED)
        micro = step_law.micro_equations(profiling, profile.engine, profile.latency)
        cache[model] = (equations, micro, np.array([run.family for run in kept]))
    equations, micro, families = cache[model]
    errors = np.zeros(len(families))
    for family in np.unique(families):
        seen, left = families != family, families == family
        part = step_law.Equations(equations.features[seen], equations.step_ms[seen], equations.weights[seen])
        weight = np.sqrt(0.5 * seen.sum() / len(micro.step_ms))
        found = solve_robustly(part + replace(micro, weights=micro.weights * weight), terms_of())
        rest = step_law.Equations(equations.features[left], equations.step_ms[left], equations.weights[left])
        errors[left] = step_law.residuals(rest, found)
    return 100 * float(np.abs(errors).mean())


def twin_errors(
    runs: list[MeasuredRun],
    profile: Profile,
    shape: Callable[[Workload], Workload] = lambda w: w,
    ceiling: int | None = MAX_OUTSTANDING,
) -> dict[str, float]:
    """SMAPE of throughput, TPOT and (queueing and starved) TTFT."""
    pairs: dict[str, list[tuple[float, float]]] = {"throughput": [], "tpot": [], "itl": [], "ttft": []}
    for run in runs:
        sim = simulate(
            shape(fleet_of(run)), profile, max_loras=run.max_loras, max_lora_rank=run.max_lora_rank,
            duration_s=run.duration_s, max_outstanding=ceiling,
        )  # fmt: skip
        for name in pairs:
            column, attribute = score.METRICS[name]
            value = float(getattr(sim, attribute))
            if (name != "ttft" or run.regime != "light") and np.isfinite(value):
                pairs[name].append((value, run.metrics[column]))
    return {name: round(smape(values), 2) for name, values in pairs.items()}


def _with_lengths(kind: str) -> Callable[[Workload], Workload]:
    def shaped(workload: Workload) -> Workload:
        mean_in, mean_out = workload.input_tokens.mean, workload.output_tokens.mean
        lengths = {
            "constant": (Lengths.constant(mean_in), Lengths.constant(mean_out), 0.0),
            "log-normal": (Lengths.lognormal(mean_in, 1.1), Lengths.lognormal(mean_out, 1.04), SHAREGPT_CORRELATION),
            "independent": (workload.input_tokens, workload.output_tokens, 0.0),
        }[kind]
        return Workload(workload.adapters, *lengths)

    return shaped


def clipped(fleet: Workload) -> Workload:
    """The fleet with lengths of at most `LONGEST` tokens, with the same means, spreads and KV tokens held."""
    sides = [(round(side.mean, 1), side.cv) for side in (fleet.input_tokens, fleet.output_tokens)]
    return Workload(fleet.adapters, *_clipped(*sides[0], *sides[1], fleet.length_correlation))


@lru_cache
def _clipped(
    mean_in: float, cv_in: float, mean_out: float, cv_out: float, correlation: float
) -> tuple[Lengths, Lengths, float]:
    wanted = held_tokens(Workload(ONE, Lengths.gamma(mean_in, cv_in), Lengths.gamma(mean_out, cv_out)), correlation, 1)
    sides = (_clipped_gamma(mean_in, cv_in), _clipped_gamma(mean_out, cv_out))
    shifted = brentq(lambda c: held_tokens(Workload(ONE, *sides), c, 1) - wanted, -0.9, 0.2, xtol=1e-3)
    return *sides, float(shifted)


def _clipped_gamma(mean: float, cv: float) -> Lengths:
    """A gamma distribution that has this mean and spread after clipping."""

    def off(factors: np.ndarray) -> list[float]:
        m, c = mean * factors[0], cv * factors[1]
        shape, end = 1.0 / c**2, LONGEST / (m * c**2)
        beyond = gammaincc(shape, end)
        first = m * gammainc(shape + 1.0, end) + LONGEST * beyond
        second = m**2 * (1.0 + c**2) * gammainc(shape + 2.0, end) + LONGEST**2 * beyond
        return [first / mean - 1.0, second / (mean**2 * (1.0 + cv**2)) - 1.0]

    factors = fsolve(off, [1.01, 1.03])
    return Lengths.gamma(float(mean * factors[0]), float(cv * factors[1]), high=LONGEST)


def main() -> None:
    """Run every trial."""
    cache: dict[str, tuple] = {}
    found: dict[str, object] = {}
    for model in MODELS:
        whole = left_out_error(model, lambda: TERMS, cache)
        terms = [
            {"effect": effect, "used": True, "with": round(whole, 2),
             "without": round(left_out_error(model, lambda d=dropped: tuple(t for t in TERMS if t not in d), cache), 2)}
            for effect, dropped in USED.items()
        ]  # fmt: skip
        terms += [
            {"effect": effect, "used": False, "without": round(whole, 2),
             "with": round(left_out_error(model, lambda a=added: TERMS + a, cache), 2)}
            for effect, added in NOT_USED.items()
        ]  # fmt: skip
        runs = stratified(tables(model)[1], 70, 5)
        profile = measured_profile(model)
        warm = replace(profile, loading=replace(profile.loading, cold_start=False))
        sparing = replace(profile, loading=replace(profile.loading, spares_batch=True))
        unscraped = replace(profile, frontend=replace(profile.frontend, scrape_interval_s=None))
        silent = replace(profile, frontend=replace(profile.frontend, output_ms=0.0))
        found[model] = {
            "terms": terms,
            "twin": {
                "as shipped": twin_errors(runs, profile),
                "constant lengths": twin_errors(runs, profile, _with_lengths("constant")),
                "log-normal lengths": twin_errors(runs, profile, _with_lengths("log-normal")),
                "input and output lengths independent": twin_errors(runs, profile, _with_lengths("independent")),
                "lengths of at most 1,024 tokens": twin_errors(runs, profile, clipped),
                "adapters in host memory at the start": twin_errors(runs, warm),
                "slots that spare the batch": twin_errors(runs, sparing),
                "/metrics never read": twin_errors(runs, unscraped),
                "streamed tokens that cost nothing": twin_errors(runs, silent),
                "no ceiling on outstanding requests": twin_errors(runs, profile, ceiling=None),
            },
        }
        print(model, record_text(found[model]))
    write_text(HERE / "trials.json", record_text(found) + "\n", force=True)


if __name__ == "__main__":
    main()
