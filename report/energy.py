"""Power and energy of the GPUs of a plan, from their board power and the share of it that their load uses.

A GPU of 700 W that decodes one request at a time draws 300 W, and 600 W with a batch of 128 (H100 SXM; ML.ENERGY
Benchmark 3.0, as read by arXiv:2603.17280). The lowest decodes measured on an H200 draw 137 W (arXiv:2605.11999). In
between, the share grows with the logarithm of the batch. Other GPUs are assumed to draw the same shares of their board
power, which is accurate to about a fifth (arXiv:2603.17280). Host, network, cooling and fine-tuning are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from packer.io.plans import plan_to_dict
from packer.plan import Plan
from packer.twin.datasheets import GPUS
from packer.twin.tuning.policy import trains
from packer.words import number

SHARES = ((0.0, 137 / 700), (1.0, 300 / 700), (128.0, 600 / 700))
"""Pairs (mean number of running requests, share of the board power)."""
SPREAD = 0.2
SOURCE = "board power by data sheet; share by load of H100 and H200: ML.ENERGY 3.0, arXiv:2603.17280, 2605.11999"


def share_of(running: float) -> float:
    """Share of its board power that a GPU draws with a mean of `running` requests."""
    (_, idle), (_, one), (most, full) = SHARES
    if running < 1.0:
        return idle + running * (one - idle)
    return one + (full - one) * min(1.0, float(np.log(running) / np.log(most)))


@dataclass(frozen=True)
class Energy:
    """`watts`: power of all GPUs under the load of requests. `tok_s`: input and output tokens served per second.
    `without_training`: whether the GPUs also train, which draws more."""

    watts: float
    tok_s: float
    without_training: bool = False

    @property
    def kwh_per_day(self) -> float:
        """Energy of a day at the load of the planned hour."""
        return self.watts * 24.0 / 1e3

    @property
    def joules_per_token(self) -> float:
        """Energy per input or output token; NaN if no token is served."""
        return self.watts / self.tok_s if self.tok_s > 0.0 else float("nan")

    def __str__(self) -> str:
        low, usual, high = (f"{(1.0 + side * SPREAD) * self.watts / 1e3:.2g}" for side in (-1, 0, 1))
        left_out = "; training not included" if self.without_training else ""
        said = f"about {usual} kW ({low} to {high}), {number(self.kwh_per_day, 0)} kWh a day,"
        return f"{said} {self.joules_per_token:.2g} J per token, GPUs alone, by their load{left_out}"


def energy_of(plan: Plan) -> Energy | None:
    """Energy of a plan's servers; None without servers, without a GPU's data sheet, or without a predicted latency. The
    mean number of running requests is output tokens per second times mean ITL (Little's law). With speculation, ITL is
    the time between chunks of tokens, so it is mean TPOT there, if the predictor gives it."""
    board = {sheet.title: sheet.watts for sheet in GPUS.values()}
    watts = 0.0
    for item, found in zip(plan.bins, plan.evaluations, strict=True):
        profile, fleet = item.profile, item.workload(plan.workload)
        generated = float(fleet.rates @ fleet.mean_output_tokens) / max(fleet.offered_tok_s, 1e-12)
        chunked = profile.engine.speculation is not None and np.isfinite(found.mean_tpot_ms)
        per_token_ms = found.mean_tpot_ms if chunked else found.mean_itl_ms
        running = found.total_token_throughput * generated * per_token_ms / 1e3
        if profile.gpu.name not in board or not np.isfinite(running):
            return None
        running /= profile.engine.data_parallel_size  # each rank's GPUs decode its own requests
        watts += share_of(running) * board[profile.gpu.name] * profile.engine.gpus
    served = float(plan.evaluations.total_token_throughput.sum())
    return Energy(watts, served, trains(plan.workload.fine_tuning)) if plan.bins else None


def with_energy(plan: Plan) -> dict[str, Any]:
    """The plan in the format of its file, plus its energy; None if the energy is not known."""
    energy = energy_of(plan)
    known = None if energy is None else {
        "watts": energy.watts, "kwh_per_day": energy.kwh_per_day, "joules_per_token": energy.joules_per_token,
        "without_training": energy.without_training, "source": SOURCE,
    }  # fmt: skip
    return {**plan_to_dict(plan), "energy": known}
