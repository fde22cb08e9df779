"""Fit the linear step law by non-negative least squares on mean states.

A mean step time is linear in the mean features, so each micro-benchmark, whole run and group of similar steps
(`packer.live`) gives one equation. Rows are weighted by 1 / step time, so that errors are relative.

Micro-benchmarks vary the batch and its adapters, but hardly ever slots, their rank and prefills with adapters. Least
squares then attribute the cost of slots to an arbitrary term, and predictions for other slots are wrong by half. The
law of the base profile, or without one that of another model, is a good guess: LoRA kernels are the same for every
model, and their costs scale with the bytes of an adapter (`packer.fit.scaled`). A fit with a `Prior` holds each term
near this guess as far as the measurements do not determine the term.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from packer.arrays import FloatArray
from packer.engine_spec import EngineSpec
from packer.errors import shown
from packer.fit.scaled import scaled_law
from packer.fit.tables import MeasuredRun, Profiling, number, positive, whole
from packer.gpu import same_model
from packer.io.profiles import load_profile, profile_names
from packer.profile import LatencySpec, Profile
from packer.terms import LINEAR_TERMS
from packer.twin.datasheets import GPUS
from packer.twin.law.linear import AT, linear_features

FOLDS = 5


WEIGHT = 6.0
"""Strength of a prior: all terms off by their own size cost as much as all equations off by this many times the error
of a fit without prior. Exact measurements therefore fix the terms that they determine."""
EXACT = 1e-4  # Relative error below which measurements count as exact.
SMALLEST = 0.02  # Least scale of a term in the penalty, as a share of a step; for terms that the prior does not have.


@dataclass(frozen=True)
class Prior:
    """Coefficients of terms, ms, and where they come from."""

    coefficients: Mapping[str, float]
    source: str


def prior_of(base: Profile) -> Prior | None:
    """The base profile's law, or that of the shipped profile with the nearest weights; None without one."""
    if base.latency.form == "linear" and base.latency.coefficients:
        return Prior(base.latency.coefficients, base.name)
    sheet = next((sheet for sheet in GPUS.values() if sheet.title == base.gpu.name), None)
    if sheet is None:
        return None
    shipped = [load_profile(name) for name in profile_names()]
    others = [
        each for each in shipped
        if not same_model(each.model, base.model) and each.engine.name == base.engine.name
        and each.latency.form == "linear" and each.name.partition("/")[0] in GPUS
    ]  # fmt: skip
    if not others or base.model.weights_bytes <= 0:
        return None
    nearest = min(others, key=lambda each: abs(math.log(each.model.weights_bytes / base.model.weights_bytes)))
    return Prior(scaled_law(base.model, sheet, nearest), f"{nearest.name}, scaled")


@dataclass(frozen=True, eq=False)
class Equations:
    """Features (n, len(LINEAR_TERMS)), step times (n,) in ms, weights (n,)."""

    features: FloatArray
    step_ms: FloatArray
    weights: FloatArray

    def __add__(self, other: Equations) -> Equations:
        return Equations(
            np.vstack([self.features, other.features]),
            np.concatenate([self.step_ms, other.step_ms]),
            np.concatenate([self.weights, other.weights]),
        )


def solve(equations: Equations, terms: Sequence[str], prior: Prior | None = None) -> dict[str, float]:
    """Fit non-negative coefficients of `terms`, ms; all other terms are absent (0).

    `prior`: holds each term near its coefficient, the more strongly the less the equations determine it.
    """
    columns = [LINEAR_TERMS.index(term) for term in terms]
    weight = equations.weights / equations.step_ms
    design, wanted = equations.features[:, columns] * weight[:, None], equations.step_ms * weight
    coefficients = non_negative(design, wanted)
    if prior is not None:
        error = float(np.sqrt(np.mean((design @ coefficients - wanted) ** 2)))
        near = np.array([prior.coefficients.get(term, 0.0) for term in terms])
        rows, right = _held(design, near, WEIGHT * max(error, EXACT))
        coefficients = non_negative(np.vstack([design, rows]), np.concatenate([wanted, right]))
    return dict(zip(terms, coefficients.tolist(), strict=True))


def non_negative(design: FloatArray, wanted: FloatArray) -> FloatArray:
    """Non-negative least squares, columns scaled to length 1; float64 (columns,)."""
    from scipy.optimize import nnls

    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-12)
    found, _ = nnls(design / scale, wanted)
    coefficients: FloatArray = found / scale
    return coefficients


def _held(design: FloatArray, near: FloatArray, weight: float) -> tuple[FloatArray, FloatArray]:
    """Return rows and right side of a ridge penalty around coefficients `near` (terms,), relative to their size."""
    n, terms = design.shape
    typical = np.sqrt((design**2).mean(axis=0))
    size = np.maximum(near, np.where(typical > 0, SMALLEST / np.maximum(typical, 1e-12), 0.0))
    size = np.where(size > 0, size, 1e-12)  # neither measured nor known: stays 0
    # All terms off by their own size then cost n × weight², as n equations off by `weight` do.
    rows = np.diag(weight * math.sqrt(n / terms) / size)
    return rows, rows @ near


def residuals(equations: Equations, coefficients: dict[str, float]) -> FloatArray:
    """Relative errors of the law on the equations, (n,)."""
    vector = np.array([coefficients.get(term, 0.0) for term in LINEAR_TERMS])
    out: FloatArray = equations.features @ vector / equations.step_ms - 1.0
    return out


def solve_unbiased(equations: Equations, terms: Sequence[str]) -> dict[str, float]:
    """Fit by least squares of errors relative to the law's own times, in three rounds. With errors relative to the
    measured times, a time that is short by chance would weigh more than a long one, and the law would be too fast by
    about the noise's squared coefficient of variation."""
    coefficients = solve(equations, terms)
    for _ in range(2):
        law_ms = equations.step_ms * (1.0 + residuals(equations, coefficients))
        weights = equations.weights * equations.step_ms / np.maximum(law_ms, 1e-6)
        coefficients = solve(Equations(equations.features, equations.step_ms, weights), terms)
    return coefficients


def cross_validated(equations: Equations, terms: Sequence[str]) -> float:
    """Mean relative error of the law on equations outside its fit, percent, weighted by steps."""
    fold = np.arange(len(equations.step_ms)) % FOLDS
    errors = np.zeros(len(fold))
    for k in range(FOLDS):
        out = fold == k
        kept = Equations(equations.features[~out], equations.step_ms[~out], equations.weights[~out])
        left = Equations(equations.features[out], equations.step_ms[out], equations.weights[out])
        errors[out] = np.abs(residuals(left, solve_unbiased(kept, terms)))
    return float(100 * np.average(errors, weights=equations.weights**2))


def micro_equations(profiling: Profiling, engine: EngineSpec, law: LatencySpec) -> Equations:
    """Equations from decode, prefill and adapter micro-benchmarks (closed loop at a fixed batch)."""
    states, times = [], []
    for row in profiling.backbone:
        prompt = positive(row, "actual_prompt_len")
        if (phase := row.text("phase")) not in ("decode", "prefill"):
            row.fail("phase", f"expected decode or prefill, got {shown(phase)}.")
        if phase == "decode":
            batch, output = positive(row, "set_batch_size"), positive(row, "set_output_length")
            context = batch * (prompt + output / 2)
            # A closed loop admits a request for each one that ends: batch / output of them in a step.
            states.append((batch, batch / output, prompt, 0.0, 0.0, 0.0, 0.0, context, 0.0, 0.0))
            times.append(positive(row, "itl_mean_ms"))
        else:
            # Steps of a prefill benchmark are full: each has as many tokens as the token budget.
            seconds = positive(row, "duration_s") / (positive(row, "completed") * prompt)
            starts = engine.max_num_batched_tokens / prompt
            states.append((0.0, starts, prompt, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
            times.append(seconds * engine.max_num_batched_tokens * 1e3)
    prompt = 5.0  # the adapters' table has one-word prompts
    for row in profiling.adapters:
        if any(map(row.is_blank, ("batch", "n_adapters", "itl_mean_ms"))):
            continue
        batch, n = positive(row, "batch"), whole(row, "n_adapters")
        output = positive(row, "set_output_length")
        rank, slots = (positive(row, name) if n > 0 else 0.0 for name in ("rank", "max_loras"))
        distinct = number(row, "mean_loras_by_batch")
        if np.isnan(distinct):  # expected where requests choose uniformly
            distinct = n * (1.0 - (1.0 - 1.0 / n) ** batch) if n > 0 else 0.0
        context = batch * (prompt + output / 2)
        states.append((batch, batch / output, prompt, distinct, distinct * rank, slots, rank, context, 0.0, n))
        times.append(positive(row, "itl_mean_ms"))
    return _equations(states, times, engine, law)


def run_equations(runs: Sequence[MeasuredRun], engine: EngineSpec, law: LatencySpec) -> Equations:
    """Equations from whole runs: TPOT is the step time, the mean state follows by Little's law."""
    states, times = [], []
    for run in (run for run in runs if run.timed):
        tpot_s = run.metrics["tpot_mean_ms"] * 1e-3
        rate = run.metrics["request_throughput"]
        stay_s = (run.mean_output_tokens - 1) * tpot_s
        batch = rate * stay_s
        served = run.rates * (rate / run.rates.sum())
        distinct = min(float(np.sum(1.0 - np.exp(-served * stay_s))), run.max_loras)
        waiting = run.metrics.get("mean_num_waiting", rate * run.metrics.get("ttft_mean_ms", 0.0) * 1e-3)
        # Requests with long answers run longer. With ShareGPT's lengths, running requests have 0.77 of the mean prompt,
        # because long answers have shorter prompts, and half of an answer of twice the mean length (its cv is near 1).
        context = batch * (run.mean_input_tokens * 0.77 + run.mean_output_tokens)
        states.append(
            (batch, rate * tpot_s, run.mean_input_tokens, distinct, distinct * run.ranks.mean(), run.max_loras,
             run.max_lora_rank, context, waiting, len(run.rates))
        )  # fmt: skip
        times.append(run.metrics["tpot_mean_ms"])
    return _equations(states, times, engine, law)


def _equations(
    states: Sequence[tuple[float, ...]], times: Sequence[float], engine: EngineSpec, law: LatencySpec
) -> Equations:
    """Equations of states: decodes, prompts that begin in a step and their length, adapters and the sum of their ranks,
    slots and their rank, context, waiting requests, registered adapters."""
    b, n, p, a, r, s, m, k, v, h = np.array(states, dtype=np.float64).reshape(-1, 10).T
    features = linear_features(
        decodes=b, prefill_tokens=n * p, adapters=a, sum_ranks=r, slots=s, slot_rank=m, kv_tokens=k, waiting=v,
        graph_max_tokens=law.graph_max_tokens, registered=h, attended=n * p * p / 2.0,
    )  # fmt: skip
    with_prompts(features, law, b, n, p, engine.max_num_batched_tokens)
    return Equations(features, np.array(times, dtype=np.float64), np.ones(len(times)))


def with_prompts(
    features: FloatArray, law: LatencySpec, decodes: FloatArray, starts: FloatArray, prompt: FloatArray, budget: float
) -> None:
    """Write the means of the terms of prompts that are not linear in tokens: of steps with and without prompts.

    `features`: of mean steps. `decodes`, `starts`, `prompt`, float64 (n,): decodes and prompts in a mean step, and
    tokens of a prompt. `budget`: most tokens of a step; a longer prompt takes several.
    """
    chunk = np.minimum(prompt, np.maximum(1.0, budget - decodes))
    chunks = starts * prompt / chunk
    ridge, share = law.ridge_tokens or np.inf, np.minimum(1.0, chunks)
    tokens = np.array([decodes, decodes + chunk * np.maximum(1.0, chunks)])
    for at, (alone, beside) in (
        (AT.per_token_beyond_ridge_ms, np.maximum(0.0, tokens - ridge)),
        (AT.experts_ms, 1.0 - (1.0 - law.expert_share) ** tokens),
    ):
        features[:, at] = alone + share * (beside - alone)
    features[:, AT.prefill_step_ms] = share
