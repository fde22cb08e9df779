"""Measured runs as workloads, and their simulation in calibrations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.adapter import Adapter
from packer.fit.tables import MeasuredRun
from packer.lengths import Lengths
from packer.profile import Profile
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload


def fleet_of(run: MeasuredRun) -> Workload:
    """Return a run's workload from rates, ranks and mean lengths, which operators know; spreads are ShareGPT's."""
    rows = enumerate(zip(run.ranks.tolist(), run.rates.tolist(), strict=True))
    adapters = [Adapter(f"a{i}", rank, rate) for i, (rank, rate) in rows]
    inputs = Lengths.gamma(run.mean_input_tokens, SHAREGPT_INPUT.cv)
    outputs = Lengths.gamma(run.mean_output_tokens, SHAREGPT_OUTPUT.cv)
    return Workload(adapters, inputs, outputs, run.length_correlation)


def simulate_run(run: MeasuredRun, profile: Profile, *, seed: int = 0, mean_state: bool = False) -> Run:
    """Simulate a run in the twin."""
    return simulate(
        fleet_of(run), profile, max_loras=run.max_loras, max_lora_rank=run.max_lora_rank, duration_s=run.duration_s,
        seed=seed, max_outstanding=run.max_outstanding, mean_state=mean_state,
    )  # fmt: skip


def stratified(runs: Sequence[MeasuredRun], limit: int, seed: int) -> list[MeasuredRun]:
    """At most `limit` of the runs that started, spread evenly over families and regimes."""
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, str], list[MeasuredRun]] = {}
    for run in runs:
        if run.ok:
            groups.setdefault((run.family, run.regime), []).append(run)
    members = (groups[key] for key in sorted(groups))
    queues = [[own[i] for i in rng.permutation(len(own))] for own in members]
    chosen: list[MeasuredRun] = []
    while queues and len(chosen) < limit:
        for queue in queues:
            if len(chosen) < limit:
                chosen.append(queue.pop())
        queues = [queue for queue in queues if queue]
    return chosen
