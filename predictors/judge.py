"""The twin's verdict on one server, with as little simulation as the verdict needs.

Requests that one run happens to draw vary by several percent in number and length, which has nothing to do
with the server: throughput is estimated as offered load × (tokens completed / tokens sent), whose noise is
far less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packer.bin import STARVATION_THRESHOLD, Evaluation
from packer.profile import Profile
from packer.twin.simulate import Simulation, simulate
from packer.workload import Workload

DURATION_S = 3600.0
"""Time over which a server is judged, as in the measurements that the profiles come from."""

SCREENING_S = 900.0
MIN_REQUESTS = 1500
MAX_REQUESTS = 400_000
LONGEST_S = 1e5
CLEARLY_SERVED = 0.93
FEW_WAITING = 2.0
NEAR_EDGE = (0.86, 0.94)
EDGE_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and what it took: simulated seconds of the last run, and how many runs."""

    evaluation: Evaluation
    duration_s: float
    runs: int


def served_share(sim: Simulation) -> float:
    """Tokens completed / tokens sent in one simulation, in [0, 1]; 1 when nothing was sent."""
    if sim.raw is None:
        return 0.0
    requests = sim.raw.requests
    sent = float(requests.input_tokens.sum() + requests.output_tokens.sum())
    return sim.total_token_throughput * sim.duration_s / sent if sent else 1.0


def evaluation_of(simulations: Sequence[Simulation]) -> Evaluation:
    """One row from simulations of the same server that differ by their seeds: the mean of each figure."""
    first = simulations[0]
    offered = first.offered_tok_s
    failed = first.status == "memory_error"
    share = float(np.mean([served_share(sim) for sim in simulations]))
    starved = failed or share < STARVATION_THRESHOLD

    def mean(name: str) -> float:
        values = [float(getattr(sim, name)) for sim in simulations]
        known = [value for value in values if not math.isnan(value)]
        return float(np.mean(known)) if known else math.nan

    return Evaluation(
        offered_tok_s=offered,
        total_token_throughput=0.0 if failed else share * offered,
        starved=starved,
        memory_error=failed,
        mean_ttft_ms=mean("mean_ttft_ms"),
        median_ttft_ms=mean("median_ttft_ms"),
        p99_ttft_ms=mean("p99_ttft_ms"),
        mean_tpot_ms=mean("mean_tpot_ms"),
        mean_itl_ms=mean("mean_itl_ms"),
        p99_itl_ms=mean("p99_itl_ms"),
        kv_cache_tokens=float(first.kv_cache_tokens),
        starvation_probability=float(starved),
    )


def judge(
    workload: Workload,
    profile: Profile,
    *,
    max_loras: int,
    max_lora_rank: int,
    seed: int = 0,
    max_outstanding: int | None = None,
) -> Judgement:
    """Simulate one server until its verdict is clear.

    A short run settles servers that serve nearly everything without a queue; all others get the whole
    `DURATION_S`, and those near the edge of starvation several seeds. Servers with few requests are simulated
    for longer, so that chance does not starve them; hopeless ones with hundreds of requests a second for less
    (at least `SCREENING_S`). Arrivals that change over time, and replayed traces, are always simulated whole.
    """
    rate, kind = workload.rate, workload.arrivals.kind
    enough_s = min(MIN_REQUESTS / rate, LONGEST_S)
    whole_s = max(SCREENING_S, min(max(DURATION_S, enough_s), MAX_REQUESTS / rate))
    if workload.arrivals.trace is not None:
        times = workload.arrivals.trace.time_s
        whole_s = min(DURATION_S, float(times[-1]) + 1.0) if len(times) else DURATION_S

    def run(duration_s: float, run_seed: int) -> Simulation:
        return simulate(
            workload,
            profile,
            max_loras=max_loras,
            max_lora_rank=max_lora_rank,
            duration_s=duration_s,
            seed=run_seed,
            max_outstanding=max_outstanding,
            timeline_bin_s=duration_s,
        )

    short_s = max(SCREENING_S, enough_s)
    if kind == "poisson" and short_s < 0.5 * whole_s:
        sim = run(short_s, seed)
        calm = served_share(sim) >= CLEARLY_SERVED and sim.mean_waiting <= FEW_WAITING
        if sim.status == "memory_error" or calm:
            return Judgement(evaluation_of([sim]), short_s, 1)
    simulations = [run(whole_s, seed)]
    near = NEAR_EDGE[0] <= served_share(simulations[0]) <= NEAR_EDGE[1]
    if near and workload.arrivals.trace is None:
        simulations += [run(whole_s, seed + 7919 * k) for k in range(1, EDGE_SEEDS)]
    found = evaluation_of(simulations)
    if len(simulations) > 1:
        starved = np.mean([served_share(sim) < STARVATION_THRESHOLD for sim in simulations])
        found = replace(found, starvation_probability=float(starved))
    return Judgement(found, whole_s, len(simulations))
