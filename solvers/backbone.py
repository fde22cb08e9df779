"""What a server would serve without adapters: the measure that load-only baselines fill GPUs by."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from packer.bin import STARVATION_THRESHOLD
from packer.profile import LoadingSpec, Profile
from packer.twin.simulate import simulate
from packer.workload import Workload

OVERLOAD_TOK_S = 60_000.0
"""Offered load at which any single GPU is saturated."""

_DURATION_S = 300.0
_BOUND_SLACK = 1.05
_ADAPTER_TERMS = (
    "first_adapter_ms",
    "per_adapter_ms",
    "per_rank_ms",
    "per_slot_ms",
    "per_lora_token_ms",
    "per_adapter_token_ms",
    "per_adapter_prefill_token_ms",
    "per_slot_token_ms",
    "k3",
    "k6",
)


def without_adapters(profile: Profile) -> Profile:
    """The same server when adapters cost neither time nor memory."""
    coefficients = {
        key: 0.0 if key in _ADAPTER_TERMS else value for key, value in profile.latency.coefficients.items()
    }
    return replace(
        profile,
        name=f"{profile.name} without adapters",
        latency=replace(profile.latency, coefficients=coefficients),
        memory=replace(profile.memory, slot_bytes=0.0, slot_bytes_per_rank=0.0, measured=()),
        loading=LoadingSpec(),
    )


@lru_cache(maxsize=32)
def backbone_tok_s(workload: Workload, profile: Profile) -> float:
    """Maximum throughput of the base model on the fleet's mix of requests, tok/s, by an overloaded twin."""
    mix = workload if workload.arrivals.trace is None else _poisson(workload)
    overloaded = mix.scaled(OVERLOAD_TOK_S / mix.offered_tok_s)
    result = simulate(
        overloaded,
        without_adapters(profile),
        max_loras=len(overloaded),
        duration_s=_DURATION_S,
        timeline_bin_s=_DURATION_S,
    )
    return result.total_token_throughput


def _poisson(workload: Workload) -> Workload:
    from packer.arrival import Arrivals

    return workload.with_arrivals(Arrivals())


def load_bound(workload: Workload, profile: Profile, margin: float) -> int:
    """GPUs that any plan needs, by load alone, relative to the twin.

    Adapters only cost: no server serves more than the base model without them, and one that serves less than
    0.9 of its load starves. The measured throughput is raised by 5 %, more than what is cut off at the end of
    its run.
    """
    most = backbone_tok_s(workload, profile) * _BOUND_SLACK / STARVATION_THRESHOLD
    return max(1, math.ceil(workload.offered_tok_s * (1.0 + margin) / most))
