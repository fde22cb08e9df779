"""Equations of the step law from tables of micro-benchmarks and of whole runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.engine_spec import EngineSpec
from packer.fit.step_law import Equations
from packer.fit.tables import MeasuredRun, Profiling, number, positive
from packer.twin.law.linear import linear_features


def micro_equations(profiling: Profiling, engine: EngineSpec, graph_max_tokens: int) -> Equations:
    """Equations from decode, prefill and adapter micro-benchmarks (closed loop at a fixed batch)."""
    states, times = [], []
    for row in profiling.backbone:
        if row.get("status", "ok") != "ok":
            continue
        prompt = positive(row, "actual_prompt_len")
        if row["phase"] == "decode":
            batch, output = positive(row, "set_batch_size"), positive(row, "set_output_length")
            context = batch * (prompt + output / 2)
            states.append((batch, prompt * batch / output, 0.0, 0.0, 0.0, 0.0, context, 0.0, 0.0))
            times.append(positive(row, "itl_mean_ms"))
        else:
            seconds = positive(row, "duration_s") / (positive(row, "completed") * prompt)
            states.append((0.0, engine.max_num_batched_tokens, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
            times.append(seconds * engine.max_num_batched_tokens * 1e3)
    prompt = 5.0  # the adapters' table has one-word prompts
    for row in profiling.adapters:
        batch, n = number(row, "batch"), number(row, "n_adapters")
        if row.get("status", "ok") != "ok" or np.isnan(batch + n + number(row, "itl_mean_ms")):
            continue
        output, rank = positive(row, "set_output_length"), number(row, "rank")
        distinct = number(row, "mean_loras_by_batch")
        if np.isnan(distinct):  # expected where requests choose uniformly
            distinct = n * (1.0 - (1.0 - 1.0 / n) ** batch) if n > 0 else 0.0
        slots = number(row, "max_loras") if n > 0 else 0.0
        context, prefills = batch * (prompt + output / 2), prompt * batch / output
        states.append((batch, prefills, distinct, distinct * rank, slots, rank, context, 0.0, n))
        times.append(positive(row, "itl_mean_ms"))
    return _equations(states, times, graph_max_tokens)


def run_equations(runs: Sequence[MeasuredRun], graph_max_tokens: int) -> Equations:
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
        context = batch * (run.mean_input_tokens * 0.77 + run.mean_output_tokens)
        states.append(
            (batch, rate * run.mean_input_tokens * tpot_s, distinct, distinct * run.ranks.mean(), run.max_loras,
             run.max_lora_rank, context, waiting, len(run.rates))
        )  # fmt: skip
        times.append(run.metrics["tpot_mean_ms"])
    return _equations(states, times, graph_max_tokens)


def _equations(
    states: Sequence[tuple[float, ...]], times: Sequence[float], graph_max_tokens: int
) -> Equations:
    """Equations of states: decodes, prefill tokens, adapters and the sum of their ranks, slots and their rank, context,
    waiting requests, registered adapters."""
    b, p, a, r, s, m, k, v, h = np.array(states, dtype=np.float64).reshape(-1, 9).T
    features = linear_features(
        decodes=b, prefill_tokens=p, adapters=a, sum_ranks=r, slots=s, slot_rank=m, kv_tokens=k,
        waiting=v, graph_max_tokens=graph_max_tokens, registered=h,
    )  # fmt: skip
    return Equations(features, np.array(times, dtype=np.float64), np.ones(len(times)))
