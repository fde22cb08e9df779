"""First fit of the linear step law: non-negative least squares on mean states.

A mean step time is linear in the means of what the terms multiply, so micro-benchmarks and whole runs give one
equation each. Rows are weighted by 1 / step time: relative errors count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packer.profile import EngineSpec
from packer.terms import LINEAR_TERMS
from packer.twin.calibrate.prior import SMALLEST, WEIGHT, Prior
from packer.twin.calibrate.tables import Profiling, Run, number
from packer.twin.law.linear import linear_features

FloatArray = npt.NDArray[np.float64]


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


def _expected_distinct(adapters: float, batch: float) -> float:
    """Distinct adapters among `batch` requests that choose uniformly."""
    return adapters * (1.0 - (1.0 - 1.0 / adapters) ** batch) if adapters > 0 else 0.0


def micro_equations(profiling: Profiling, engine: EngineSpec, graph_max_tokens: int) -> Equations:
    """Equations from decode, prefill and adapter micro-benchmarks (closed loop at a fixed batch)."""
    states, times = [], []
    for row in profiling.backbone:
        if row.get("status", "ok") != "ok":
            continue
        prompt = number(row, "actual_prompt_len")
        if row["phase"] == "decode":
            batch, output = number(row, "set_batch_size"), number(row, "set_output_length")
            states.append((batch, prompt * batch / output, 0.0, 0.0, 0.0, 0.0, batch * (prompt + output / 2)))
            times.append(number(row, "itl_mean_ms"))
        else:
            seconds = number(row, "duration_s") / (number(row, "completed") * prompt)
            states.append((0.0, engine.max_num_batched_tokens, 0.0, 0.0, 0.0, 0.0, 0.0))
            times.append(seconds * engine.max_num_batched_tokens * 1e3)
    prompt = 5.0  # the adapters' table has one-word prompts
    for row in profiling.adapters:
        batch, n = number(row, "batch"), number(row, "n_adapters")
        if row.get("status", "ok") != "ok" or np.isnan(batch + n + number(row, "itl_mean_ms")):
            continue
        output, rank = number(row, "set_output_length"), number(row, "rank")
        distinct = number(row, "mean_loras_by_batch")
        distinct = _expected_distinct(n, batch) if np.isnan(distinct) else distinct
        slots = number(row, "max_loras") if n > 0 else 0.0
        context = batch * (prompt + output / 2)
        states.append((batch, prompt * batch / output, distinct, distinct * rank, slots, rank, context))
        times.append(number(row, "itl_mean_ms"))
    if not states:
        return Equations(np.zeros((0, len(LINEAR_TERMS))), np.zeros(0), np.zeros(0))
    b, p, a, r, s, m, k = np.array(states, dtype=np.float64).T
    features = linear_features(
        decodes=b, prefill_tokens=p, adapters=a, sum_ranks=r, slots=s, slot_rank=m, kv_tokens=k,
        waiting_scanned=0.0, waiting=0.0, graph_max_tokens=graph_max_tokens,
    )  # fmt: skip
    step_ms = np.array(times)
    return Equations(features, step_ms, np.ones(len(step_ms)))


def run_equations(runs: Sequence[Run], graph_max_tokens: int) -> Equations:
    """Equations from whole runs: TPOT is the step time, the mean state follows by Little's law."""
    usable = [run for run in runs if run.ok and {"tpot_mean_ms", "request_throughput"} <= run.metrics.keys()]
    states, times = [], []
    for run in usable:
        tpot_s = run.metrics["tpot_mean_ms"] * 1e-3
        rate = run.metrics["request_throughput"]
        stay_s = (run.mean_output_tokens - 1) * tpot_s
        batch = rate * stay_s
        served = run.rates * (rate / run.rates.sum())
        distinct = min(float(np.sum(1.0 - np.exp(-served * stay_s))), run.max_loras)
        waiting = run.metrics.get("mean_num_waiting", rate * run.metrics.get("ttft_mean_ms", 0.0) * 1e-3)
        scanned = waiting if distinct >= 0.98 * run.max_loras < len(run.rates) else 0.0
        context = batch * (run.mean_input_tokens * 0.77 + run.mean_output_tokens)
        states.append(
            (batch, rate * run.mean_input_tokens * tpot_s, distinct, distinct * run.ranks.mean(), run.max_loras,
             run.max_lora_rank, context, scanned, waiting)
        )  # fmt: skip
        times.append(run.metrics["tpot_mean_ms"])
    if not states:
        return Equations(np.zeros((0, len(LINEAR_TERMS))), np.zeros(0), np.zeros(0))
    b, p, a, r, s, m, k, w, v = np.array(states, dtype=np.float64).T
    features = linear_features(
        decodes=b, prefill_tokens=p, adapters=a, sum_ranks=r, slots=s, slot_rank=m, kv_tokens=k,
        waiting_scanned=w, waiting=v, graph_max_tokens=graph_max_tokens,
    )  # fmt: skip
    return Equations(features, np.array(times), np.ones(len(times)))


def solve(equations: Equations, terms: Sequence[str], prior: Prior | None = None) -> dict[str, float]:
    """Non-negative coefficients of some terms, ms; the others are absent (0).

    `prior`: each term is held near its coefficient there, the more the less the equations say of it.
    """
    from scipy.optimize import nnls

    columns = [LINEAR_TERMS.index(term) for term in terms]
    weight = equations.weights / equations.step_ms
    design, wanted = equations.features[:, columns] * weight[:, None], equations.step_ms * weight
    if prior is not None:
        rows, right = _held(design, np.array([prior.coefficients.get(term, 0.0) for term in terms]))
        design, wanted = np.vstack([design, rows]), np.concatenate([wanted, right])
    scale = np.maximum(np.linalg.norm(design, axis=0), 1e-12)
    coefficients, _ = nnls(design / scale, wanted)
    return dict(zip(terms, (coefficients / scale).tolist(), strict=True))


def _held(design: FloatArray, near: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rows and right side of a ridge around coefficients `near` (terms,), in units of their own size."""
    n, terms = design.shape
    typical = np.sqrt((design**2).mean(axis=0))
    size = np.maximum(near, np.where(typical > 0, SMALLEST / np.maximum(typical, 1e-12), 0.0))
    size = np.where(size > 0, size, 1e-12)  # neither measured nor known: stays 0
    rows = np.diag(WEIGHT * math.sqrt(n / terms) / size)
    return rows, rows @ near


def residuals(equations: Equations, coefficients: dict[str, float]) -> FloatArray:
    """Relative errors of the law on the equations, (n,)."""
    vector = np.array([coefficients.get(term, 0.0) for term in LINEAR_TERMS])
    out: FloatArray = equations.features @ vector / equations.step_ms - 1.0
    return out
