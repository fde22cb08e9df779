"""Fit a profile to the step logs of a real server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.errors import LiveError
from packer.fit.step_law import Equations, cross_validated, residuals, solve_unbiased
from packer.live.launch import Launch
from packer.live.results import LoadResult
from packer.live.step_log import Steps
from packer.profile import LatencySpec, LoadingSpec, MemorySpec, Profile
from packer.settings import Settings
from packer.twin.law.linear import linear_features
from packer.twin.memory.policy import least_kv_tokens

TERMS = (
    "base_ms", "per_decode_ms", "per_prefill_token_ms", "prefill_step_ms", "first_adapter_ms",
    "per_adapter_ms", "per_rank_ms", "per_lora_token_ms", "per_adapter_token_ms", "per_kv_token_ms",
)  # fmt: skip
SLOT_TERMS = ("per_slot_ms", "per_slot_token_ms")
SLOT_RANK_TERMS = ("per_slot_rank_ms", "per_slot_rank_token_ms")
WAITING_TERMS = ("per_waiting_ms",)
GRAPH_TERMS = ("beyond_graph_step_ms", "per_token_beyond_graph_ms")
EXPERT_TERMS = ("experts_ms",)
EXPERT_SHARES = tuple(2.0**-k for k in range(2, 9))  # Shares of experts tried: the steps tell a mixture of experts.
MUCH_LESS = 0.7  # A law with experts is taken if its error on steps left out is at most this share of that without.
MIN_EQUATIONS = 12
GRAPH_MAX_TOKENS = 512  # Largest batch with a CUDA graph, vLLM's default.
OUTLIER = 6.0  # Step times are clipped to this many medians of their kind: longer ones are interruptions.


@dataclass(frozen=True, eq=False)
class Observations:
    """Batch states and mean step times of one server; each row is the mean of `count` steps. All float64 (n,): decodes,
    prefill_tokens, adapters, sum_ranks, kv_tokens, step_ms, count, waiting requests."""

    settings: Settings
    decodes: FloatArray
    prefill_tokens: FloatArray
    adapters: FloatArray
    sum_ranks: FloatArray
    kv_tokens: FloatArray
    step_ms: FloatArray
    count: FloatArray
    waiting: FloatArray

    def equations(self, expert_share: float = 0.0) -> Equations:
        """Return one equation per row, weighted by the square root of its number of steps."""
        names = ("decodes", "prefill_tokens", "adapters", "sum_ranks", "kv_tokens", "waiting")
        features = linear_features(
            **{name: getattr(self, name) for name in names}, graph_max_tokens=GRAPH_MAX_TOKENS,
            slots=float(self.settings.max_loras), slot_rank=float(self.settings.max_lora_rank),
            expert_share=expert_share,
        )  # fmt: skip
        return Equations(features, self.step_ms, np.sqrt(self.count))


def waiting_at(steps: Steps, load: LoadResult) -> FloatArray:
    """Return the waiting requests in each step, (n,): sent, not finished and not in the batch. The client and the
    worker share the machine's monotonic clock; the worker has no access to the queue."""
    now = steps.start_s - load.started_monotonic_s
    sent = np.sort(load.sent_s[np.isfinite(load.sent_s)])
    finished = np.sort(load.finish_s[np.isfinite(load.finish_s)])
    outstanding = np.searchsorted(sent, now) - np.searchsorted(finished, now)
    return np.maximum(outstanding - steps.decodes - steps.prefills, 0.0)


def from_steps(steps: Steps, settings: Settings, waiting: FloatArray | None = None) -> Observations:
    """Average a step log over similar states: single steps are noisy, and relative weights favour short ones.

    The time of a step is from its start to the next step's start, less loading of adapters, which has its own law.
    `waiting`: requests that wait in each step, (n,).
    """
    waiting = np.zeros(len(steps)) if waiting is None else waiting
    periods = steps.periods_ms() - steps.host_ms - steps.disk_ms
    keep = np.isfinite(periods) & (periods > 0)
    steps, periods, waiting = steps.where(keep), periods[keep], waiting[keep]
    levels = [_level(each) for each in (steps.decodes, steps.prefill_tokens, steps.adapters)]
    kinds = np.column_stack([*levels, (steps.adapters > 0).astype(np.int64)])
    _, group = np.unique(kinds, axis=0, return_inverse=True)
    group = group.ravel()
    count = np.bincount(group).astype(np.float64)
    n = len(count)
    medians = np.array([np.median(periods[group == k]) for k in range(n)])
    clipped = np.minimum(periods, OUTLIER * medians[group])

    def mean(values: FloatArray) -> FloatArray:
        return np.bincount(group, weights=values, minlength=n) / count

    names = ("decodes", "prefill_tokens", "adapters", "sum_ranks", "kv_tokens")
    columns = [*(mean(getattr(steps, name)) for name in names), mean(clipped), count, mean(waiting)]
    return Observations(settings, *columns)


def _level(values: FloatArray) -> IntArray:
    """Quantise a count: exact values up to 4, then steps of a quarter of an octave."""
    fine = np.round(4.0 * np.log2(np.maximum(values, 1.0))).astype(np.int64)
    return np.where(values <= 4, values.astype(np.int64), fine)


def fit_step_law(observations: Sequence[Observations]) -> tuple[LatencySpec, dict[str, float]]:
    """Fit the linear law by non-negative least squares; return it with its cross-validated and own errors. Raises
    `LiveError`: too few measurements for any law."""
    total = sum(len(each.count) for each in observations)
    if total < MIN_EQUATIONS:
        raise LiveError(f"Expected at least {MIN_EQUATIONS} different batch states to fit a step law, got {total}.")
    tried = [(*_equations(observations, share), share) for share in (0.0, *EXPERT_SHARES)]
    held_out = [cross_validated(equations, terms) for equations, terms, _ in tried]
    best = int(np.argmin(held_out))
    best = best if held_out[best] < MUCH_LESS * held_out[0] else 0
    equations, terms, share = tried[best]
    coefficients = {k: v for k, v in solve_unbiased(equations, terms).items() if v > 0.0}
    errors = {"step_time_cross_validated_percent": held_out[best]}
    weights = equations.weights**2
    own = np.abs(residuals(equations, coefficients))
    errors["step_time_fit_percent"] = float(100 * np.average(own, weights=weights))
    return LatencySpec("linear", coefficients, GRAPH_MAX_TOKENS, expert_share=share), errors


def _equations(observations: Sequence[Observations], expert_share: float) -> tuple[Equations, tuple[str, ...]]:
    """Return the equations and the terms of a model whose tokens go to this share of a layer's experts; 0: to none."""
    parts = [each.equations(expert_share) for each in observations if len(each.count)]
    return sum(parts[1:], parts[0]), _terms(observations) + (EXPERT_TERMS if expert_share else ())


def _terms(observations: Sequence[Observations]) -> tuple[str, ...]:
    """Terms that the measurements can distinguish."""
    terms: tuple[str, ...] = TERMS
    if len({o.settings.max_loras for o in observations}) > 1:
        terms += SLOT_TERMS
    if len({o.settings.max_lora_rank for o in observations}) > 1:
        terms += SLOT_RANK_TERMS
    if any(o.waiting.any() for o in observations):
        terms += WAITING_TERMS
    tokens = max((float((o.decodes + o.prefill_tokens).max(initial=0.0)) for o in observations), default=0.0)
    return terms + GRAPH_TERMS if tokens > GRAPH_MAX_TOKENS else terms


def fit_loading(logs: Sequence[Steps]) -> LoadingSpec:
    """Fit the times of loading adapters from host memory and from disk, a + b × rank each."""
    host = _load_line([(s.host_loads, s.host_ranks, s.host_ms) for s in logs])
    return LoadingSpec(*host, *_load_line([(s.disk_loads, s.disk_ranks, s.disk_ms) for s in logs]))


def _load_line(parts: Sequence[tuple[FloatArray, FloatArray, FloatArray]]) -> tuple[float, float]:
    from scipy.optimize import nnls

    if not parts:
        return 0.0, 0.0
    loads, ranks, ms = (np.concatenate([part[k] for part in parts]) for k in range(3))
    some = loads > 0
    # So few loads don't tell what depends on the rank.
    if int(some.sum()) < 3:
        return (float(ms[some].sum() / loads[some].sum()), 0.0) if some.any() else (0.0, 0.0)
    (base, per_rank), _ = nnls(np.column_stack([loads[some], ranks[some]]), ms[some])
    return float(base), float(per_rank)


def fit_memory(launch: Launch, points: Mapping[Settings, int]) -> MemorySpec:
    """Fit the KV capacity to measured points (settings → tokens): exact at these points, linear elsewhere. With
    emulated slot memory, the line is that of the emulation. Otherwise two points determine the budget and the bytes per
    slot and rank; a single point determines the budget, with the model's own bytes per rank."""
    kv, minimum = launch.model_spec.kv_bytes_per_token, least_kv_tokens(launch.model_spec, launch.engine)
    measured = tuple(sorted((each.max_loras, each.max_lora_rank, tokens) for each, tokens in points.items()))
    if launch.emulation is not None:
        e = launch.emulation
        return MemorySpec(e.kv_budget_bytes, 0.0, e.slot_bytes_per_rank, minimum, "reserved", measured)
    if not points:
        raise LiveError("The server's KV cache capacity could not be read from /metrics.")
    slots = np.array([each.max_loras * each.max_lora_rank for each in points], dtype=np.float64)
    left = np.array(list(points.values()), dtype=np.float64) * kv
    per_rank = launch.model_spec.lora_bytes_per_rank
    if len(set(slots.tolist())) > 1:
        # Each unit of slots × rank takes this many bytes from the KV cache.
        per_rank = max(0.0, -float(np.polyfit(slots, left, 1)[0]))
    return MemorySpec(float(np.mean(left + slots * per_rank)), 0.0, per_rank, minimum, "reserved", measured)


def assemble(
    launch: Launch, observations: Sequence[Observations], logs: Sequence[Steps],
    capacity: Mapping[Settings, int], how: str, memory: MemorySpec | None = None,
) -> Profile:  # fmt: skip
    """Return the profile of a calibration, with errors and provenance; `memory` is used if no capacity was read."""
    latency, errors = fit_step_law(observations)
    steps = int(sum(o.count.sum() for o in observations))
    provenance = {
        "source": "packer live calibrate",
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "how": how,
        "steps": str(steps),
        "engine": f"{launch.engine.name} {launch.engine.version}",
    }
    if launch.emulation is not None:
        provenance["memory"] = "emulated: slots are deducted from the KV cache's bytes by packer"
    known = memory if memory is not None and not capacity else fit_memory(launch, capacity)
    return Profile(
        name=launch.name, model=launch.model_spec, gpu=launch.gpu, engine=launch.engine, memory=known,
        latency=latency, loading=fit_loading(logs), calibrated=True, provenance=provenance, errors=errors,
    )  # fmt: skip
