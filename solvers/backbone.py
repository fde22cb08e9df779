"""What a server would serve without adapters: the measure that load-only baselines fill GPUs by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from packer.arrival import Arrivals
from packer.evaluation import STARVATION_THRESHOLD
from packer.memo import Memo
from packer.predictors.features import fleet_table
from packer.profile import LoadingSpec, Profile
from packer.terms import LINEAR, PAPER
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.result import Simulation
from packer.twin.simulate import simulate
from packer.workload import Workload

OVERLOAD_TOK_S = 60_000.0
"""Offered load at which a single GPU is saturated; more where it is not."""

_SHORTEST_S = 300.0
_LONGEST_S = 20_000.0
_ANSWERS = 30.0
_BOUND_SLACK = 1.05
_BACKBONE_TERMS = {term.name for term in LINEAR + PAPER if term.part == "model"}
"""Terms of both step laws that are left without adapters and without a queue."""


_fleet_table = Memo(fleet_table)


def without_adapters(profile: Profile) -> Profile:
    """The same server when adapters and queues cost neither time nor memory."""
    known = profile.latency.coefficients.items()
    coefficients = {key: value if key in _BACKBONE_TERMS else 0.0 for key, value in known}
    return replace(
        profile,
        name=f"{profile.name} without adapters",
        latency=replace(profile.latency, coefficients=coefficients),
        memory=replace(profile.memory, slot_bytes=0.0, slot_bytes_per_rank=0.0, measured=()),
        loading=LoadingSpec(),
    )


@Memo
def _throughputs(workload: Workload) -> dict[Profile, float]:
    """Room for the base model's throughput on each profile."""
    return {}


def backbone_tok_s(workload: Workload, profile: Profile) -> float:
    """Maximum throughput of the base model on the fleet's mix of requests, tok/s, by an overloaded twin.

    Completed tokens per second over the second half of a run that lasts as long as about 30 answers: the first
    half fills the batch.
    """
    known = _throughputs(workload)
    if profile not in known:
        known[profile] = _saturated_tok_s(workload, profile)
    return known[profile]


def _saturated_tok_s(workload: Workload, profile: Profile) -> float:
    mix = workload.with_arrivals(Arrivals())
    bare = without_adapters(profile)
    load, duration_s = OVERLOAD_TOK_S, _SHORTEST_S
    while True:
        found = _overloaded(mix, bare, load, duration_s)
        served = _second_half_tok_s(found)
        needed_s = min(_LONGEST_S, _ANSWERS * _answer_s(found))
        if needed_s > 1.2 * duration_s:
            duration_s = needed_s
        elif served > 0.8 * load:
            load *= 4.0
        else:
            return served


def _overloaded(mix: Workload, bare: Profile, load_tok_s: float, duration_s: float) -> Simulation:
    return simulate(
        mix.scaled(load_tok_s / mix.offered_tok_s),
        bare,
        max_loras=len(mix),
        duration_s=duration_s,
        timeline_bin_s=duration_s,
    )


def _answer_s(found: Simulation) -> float:
    """How long a mean answer takes in the full batch, s."""
    output = float(np.average(found.workload.mean_output_tokens, weights=found.workload.rates))
    step_s = found.busy_share * found.duration_s / max(1, found.engine_steps)
    return output * step_s


def _second_half_tok_s(found: Simulation) -> float:
    sent, half_s = found.raw.requests, found.duration_s / 2
    late = found.raw.finished & (found.raw.finish_s >= half_s)
    return float((sent.input_tokens[late] + sent.output_tokens[late]).sum()) / half_s


def engine_load(workload: Workload, profile: Profile) -> float:
    """Seconds of engine time that a second's requests take at the least, without adapters; in servers.

    Sums over requests, hence the same however adapters are placed. Of the step law only what every step pays is
    shared: there are at least as many steps as decodes / `max_num_seqs`, and as KV tokens held over all steps /
    KV capacity.
    """
    return float(_busy_s(workload, profile).sum(axis=1).max())


def _busy_s(workload: Workload, profile: Profile) -> npt.NDArray[np.float64]:
    """Engine time of each adapter, s per s, float64 (2, n): steps shared by `max_num_seqs`, and by the KV cache."""
    _rank, rate, prompt, output, _i2, output_2, product, _group = _fleet_table(workload).T
    bare = without_adapters(profile)
    law, kv_tokens = bare.latency.coefficients, kv_cache_tokens(bare, bare.settings(1, 8))
    decodes = rate * np.maximum(output - 1.0, 0.0)
    held = rate * np.maximum(product + 0.5 * output_2 - prompt - output, 0.0)
    steps = np.stack([decodes / profile.engine.max_num_seqs, held / max(kv_tokens, 1)])
    if profile.latency.form == "paper":
        per_step, per_decode = law.get("k5", 0.0), law.get("k4", 0.0)
        ms = law.get("k7", 0.0) * (per_step * steps + per_decode * decodes) + law.get("k1", 0.0) * decodes
    else:
        ms = law.get("base_ms", 0.0) * steps + law.get("per_decode_ms", 0.0) * decodes
        ms += law.get("per_prefill_token_ms", 0.0) * rate * prompt
        ms += law.get("per_kv_token_ms", 0.0) * held
    return np.asarray(ms * 1e-3, dtype=np.float64)


def mixed_bound(workload: Workload, weights: Mapping[Profile, float], margin: float) -> float:
    """What servers of several kinds weigh together at the least, by `engine_load`, where one weighs `weights`.

    A set of adapters on kind k weighs at least w_k max(Σ a, Σ b), the two rows of `_busy_s`, hence
    w_k Σ ((1 − t) a + t b) for every t in [0, 1]: each adapter weighs no less than on its best kind.
    """
    least = min(weights.values())
    factor = _load_factor(workload, margin)
    if factor is None:
        return least
    busy = [weight * _busy_s(workload, profile) for profile, weight in weights.items()]
    total = max(
        float(np.min([(1.0 - t) * first + t * second for first, second in busy], axis=0).sum())
        for t in np.linspace(0.0, 1.0, 11).tolist()
    )
    return max(least, total * factor)


def _load_factor(workload: Workload, margin: float, stable: bool = False) -> float | None:
    """By what servers count less than their load: a server that serves 0.9 of it does not starve (a `stable` one serves
    all), and 5 % are left for chance. None for arrivals whose mean rate is not that of the fleet."""
    arrivals = workload.arrivals
    if arrivals.kind in ("trace", "unpredictable"):
        return None
    swing = float(np.mean(arrivals.factors)) if arrivals.kind == "piecewise" else 1.0
    return swing * (1.0 + margin) * (1.0 if stable else STARVATION_THRESHOLD) / _BOUND_SLACK


def load_bound(
    workload: Workload, profile: Profile, margin: float, *, simulated: bool = True, stable: bool = False
) -> int:
    """Servers that any plan needs, by load alone, relative to the twin.

    Adapters only cost: no server serves more than the base model without them, and one that serves less than
    0.9 of its load starves. Measured by an overloaded twin, if `simulated`, where every server gets the same mix of
    lengths; in any case by `engine_load`. Both leave 5 % for chance. `stable`: no server may leave a share of its load
    waiting. 1 for arrivals whose mean rate is not that of the fleet.
    """
    factor = _load_factor(workload, margin, stable)
    if factor is None:
        return 1
    busy = engine_load(workload, profile)
    if simulated and len({(a.input_tokens, a.output_tokens) for a in workload.adapters}) == 1:
        busy = max(busy, workload.offered_tok_s / backbone_tok_s(workload, profile))
    return max(1, math.ceil(busy * factor))
