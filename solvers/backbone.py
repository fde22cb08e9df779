"""Throughput of a server if adapters cost nothing, or as little as possible: for load-only baselines and for bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache, partial

import numpy as np

from packer.adapter import IDLE_RATE
from packer.arrays import FloatArray, distinct
from packer.arrival import Arrivals
from packer.checks import slot_rank_for
from packer.evaluation import STARVATION_THRESHOLD
from packer.lengths import Lengths, each_at_normal, paired
from packer.memo import Memo
from packer.predictors.features import fleet_table, length_pairs
from packer.profile import FrontEndSpec, LoadingSpec, Profile
from packer.terms import LINEAR, LINEAR_TERMS, PAPER
from packer.twin.engine_rules import caches_prefixes
from packer.twin.memory.held import held_by_adapter
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.simulate import simulate
from packer.workload import Workload

OVERLOAD_TOK_S = 60_000.0  # First offered load to try to saturate a server; it is raised until the server is saturated.
_SHORTEST_S = 300.0
_LONGEST_S = 20_000.0
_ANSWERS = 30.0
_BOUND_SLACK = 1.05
_STABLE_SLACK = 1.1  # With heavy-tailed lengths a queue may stay level in a run at 1.055 times the measured throughput.
_BACKBONE_TERMS = {term.name for term in LINEAR + PAPER if term.part == "model"}
"""Terms of both step laws that remain without adapters and without a queue."""


_fleet_table, _length_pairs = Memo(fleet_table), Memo(length_pairs)


@lru_cache(maxsize=64)
def without_adapters(profile: Profile) -> Profile:
    """The same server if adapters and queues cost neither time nor memory."""
    known = profile.latency.coefficients.items()
    coefficients = {key: value if key in _BACKBONE_TERMS else 0.0 for key, value in known}
    return replace(
        profile, name=f"{profile.name} without adapters", loading=LoadingSpec(),
        latency=replace(profile.latency, coefficients=coefficients),
        memory=replace(profile.memory, slot_bytes=0.0, slot_bytes_per_rank=0.0, measured=()),
        frontend=FrontEndSpec(),  # requests that only wait cost it, too, and a server that keeps up merges outputs
    )  # fmt: skip


@lru_cache(maxsize=256)
def lightest(profile: Profile, rank: int) -> Profile:
    """The same server, except that each step pays for one slot of this rank with one adapter in it, and no more. Every
    request has an adapter, or none has one (rank 0). Steps of a real server with adapters of this rank take at least as
    long. Terms of thread blocks and of ranks summed over adapters are left out."""
    if rank == 0:
        return without_adapters(profile)
    law, slot = profile.latency.coefficients, slot_rank_for(rank)
    paid = {name: law.get(name, 0.0) for name in LINEAR_TERMS}
    token_ms = paid["per_lora_token_ms"] + paid["per_adapter_token_ms"] + paid["per_slot_token_ms"]
    token_ms += paid["per_slot_rank_token_ms"] * slot
    rank_ms = paid["per_request_rank_ms"] + paid["per_padded_rank_ms"]
    step_ms = paid["first_adapter_ms"] + paid["per_adapter_ms"] + paid["per_slot_ms"]
    more = {
        "base_ms": step_ms + paid["per_slot_rank_ms"] * slot,
        "per_decode_ms": token_ms + rank_ms * rank,
        "per_prefill_token_ms": token_ms,
        # The paper's law has a factor k6 · adapters + k7, here with one adapter.
        "k7": law.get("k6", 0.0),
    }
    bare = without_adapters(profile)
    known = {name: value + more.get(name, 0.0) for name, value in bare.latency.coefficients.items()}
    return replace(bare, latency=replace(bare.latency, coefficients=known))


def backbone_tok_s(workload: Workload, profile: Profile) -> float:
    """Maximum throughput of the base model on the fleet's mix of requests, tok/s, measured on an overloaded twin.
    Counts the tokens of requests that finish in the second half of a run. The run lasts about as long as 30 answers,
    and its first half fills the batch."""
    return _served(workload)(profile)[0]


def _most_tok_s(workload: Workload, profile: Profile) -> float:
    """`backbone_tok_s`, at lower loads, too, if the overloaded twin preempts: that may take a fifth of its work."""
    served, preemptions = _served(workload)(profile)
    most = 0.0 if preemptions else served
    while served > most:
        most, served = served, _served(workload)(profile, _BOUND_SLACK * served)[0]
    return most


def _served_tok_s(workload: Workload, profile: Profile, offered_tok_s: float | None = None) -> tuple[float, int]:
    """Throughput, tok/s, and preemptions of the server without adapters; None: at a load that saturates it."""
    mix = workload.as_independent(cached=caches_prefixes(workload, profile)) if workload.has_sessions else workload
    mix, bare = mix.with_arrivals(Arrivals()), without_adapters(profile)
    if mix.rate <= IDLE_RATE * len(mix):  # idle adapters stay idle in a fleet times a factor
        mix = replace(mix, adapters=tuple(adapter.at_rate(1.0) for adapter in mix.adapters))
    prompts, outputs = mix.rates @ _requests(mix, bare)[:2].T
    load, duration_s = offered_tok_s or OVERLOAD_TOK_S, _SHORTEST_S
    while True:
        asked = mix.scaled(load / (prompts + outputs))
        found = simulate(asked, bare, max_loras=len(mix), duration_s=duration_s, timeline_bin_s=duration_s)
        sent, half_s = found.raw.requests, duration_s / 2
        late = found.raw.finished & (found.raw.finish_s >= half_s)
        served = float((sent.input_tokens[late] + sent.output_tokens[late]).sum()) / half_s
        step_s = found.busy_share * duration_s / max(1, found.engine_steps)
        needed_s = min(_LONGEST_S, _ANSWERS * outputs / mix.rate * step_s)
        if needed_s > 1.2 * duration_s:
            duration_s = needed_s
        elif offered_tok_s is None and served > 0.8 * load:
            load *= 4.0
        else:
            return served, found.preemptions


def engine_load(workload: Workload, profile: Profile) -> float:
    """Least engine time, s, that the requests of one second take: a lower bound on servers.

    This is a sum over requests, so it does not depend on placement: each request pays what the `lightest` server of
    its rank takes. A request also pays its share of the fixed time of steps. The number of steps is at least decodes /
    `max_num_seqs`, and at least (KV tokens held, summed over all steps) / KV capacity. With speculative decoding there
    are fewer decodes, by the drafts that are accepted; neither the drafter nor the others cost anything.
    """
    return float(engine_s(workload)(profile).sum(axis=1).max())


def _requests(workload: Workload, profile: Profile) -> FloatArray:
    """Moments of the requests of each adapter, float64 (4, n): tokens in, out, E[out²] and E[in × out]. A server cuts
    requests that exceed its longest context: prompts first, then outputs."""
    found = _fleet_table(workload).T[[2, 3, 5, 6]]
    longest = min(profile.engine.max_model_len, profile.memory.min_kv_tokens)
    # A server has room for fewer tokens of requests that hold more than these take.
    longest = int(longest / max(1.0, _shares_held(workload, profile).max()))
    pairs, kind = _length_pairs(workload)
    scores = np.full(len(pairs), 5.0)  # the highest of `normal_grid`
    first, second = (each_at_normal(lengths, np.arange(len(pairs)), scores) for lengths in zip(*pairs, strict=True))
    for k in np.flatnonzero(first + second > longest).tolist():
        own, cut = np.flatnonzero(kind == k), _cut_moments(*pairs[k], workload.length_correlation, longest)
        found[:, own] = np.minimum(found[:, own], np.array(cut)[:, None])
    return found


@lru_cache(maxsize=4096)
def _cut_moments(first: Lengths, second: Lengths, correlation: float, longest: int) -> tuple[float, ...]:
    """The moments of `_requests` for requests of these lengths, cut to `longest` tokens."""
    inputs, outputs, weight = paired(first, second, correlation)
    prompt = np.minimum(inputs, longest - 1).astype(np.float64)
    output = np.minimum(outputs, longest - prompt)
    whole = (prompt + 0.0 * output, output, output**2, prompt * output)
    return tuple(float(weight @ each @ weight) for each in whole)


def _shares_held(workload: Workload, profile: Profile) -> FloatArray:
    """KV cache that each adapter's requests hold, relative to what their tokens take, float64 (n,)."""
    if profile.model.kv_shape is None:
        return np.ones(len(workload))
    held, tokens = held_by_adapter(workload, profile.model.kv_shape).T
    found: FloatArray = np.divide(held, tokens, out=np.ones(len(workload)), where=tokens > 0.0)
    return found


def _drafts(workload: Workload, profile: Profile) -> tuple[int, FloatArray]:
    """Drafts of a decode, and the most tokens that a decode of each adapter gives on average, float64 (n,)."""
    spec = profile.engine.speculation
    if spec is None:
        return 0, np.ones(len(workload))
    shares = [spec.acceptance if each.acceptance is None else each.acceptance for each in workload.adapters]
    return spec.num_speculative_tokens, 1.0 + spec.num_speculative_tokens * np.array(shares)


def _busy_s(workload: Workload, profile: Profile) -> FloatArray:
    """Engine time of each adapter, s per s, float64 (2, n); `max_num_seqs` bounds the steps in row 0, KV in row 1. With
    k drafts, of which the share a is accepted, a decode gives 1 + k a tokens on average (by Wald's equation that holds
    for requests of any length). It holds the KV of its first token; that of its x-th is x - 1 tokens more."""
    rate, (prompt, output, output_2, product) = workload.rates, _requests(workload, profile)
    tokens = rate * np.maximum(output - 1.0, 0.0)
    # At least Σ over decodes of the tokens held: prompt · (output - 1) + output · (output - 1) / 2.
    held = rate * np.maximum(product + 0.5 * output_2 - prompt - output, 0.0)
    drafts, yielded = _drafts(workload, profile)
    decodes = tokens / yielded
    held = np.maximum(held - 0.5 * drafts * (tokens + drafts * rate), 0.0) / yielded
    held_kv = held * _shares_held(workload, profile)
    kv_tokens = kv_cache_tokens(without_adapters(profile), profile.settings(1, 8))
    ms = np.zeros((2, len(rate)))
    for rank in distinct(workload.ranks).tolist():
        law = lightest(profile, rank).latency.coefficients
        own = workload.ranks == rank
        steps = np.stack([decodes[own] / profile.engine.server_seqs, held_kv[own] / max(kv_tokens, 1)])
        if profile.latency.form == "paper":
            per_step, per_decode = law.get("k5", 0.0), law.get("k4", 0.0)
            ms[:, own] = law.get("k7", 0.0) * (per_step * steps + per_decode * decodes[own])
            ms[:, own] += law.get("k1", 0.0) * decodes[own]
        else:
            ms[:, own] = law.get("base_ms", 0.0) * steps + law.get("per_decode_ms", 0.0) * decodes[own]
            ms[:, own] += profile.latency.coefficients.get("per_decode_ms", 0.0) * (tokens - decodes)[own]
            ms[:, own] += law.get("per_prefill_token_ms", 0.0) * (rate * prompt)[own]
            ms[:, own] += law.get("per_kv_token_ms", 0.0) * held[own]
    return ms * 1e-3


_served = Memo[Workload, Callable[..., tuple[float, int]]](lambda fleet: cache(partial(_served_tok_s, fleet)))
engine_s = Memo[Workload, Callable[[Profile], FloatArray]](lambda fleet: cache(partial(_busy_s, fleet)))


def mixed_bound(workload: Workload, weights: Mapping[Profile, float], margins: Mapping[Profile, float]) -> float:
    """Lower bound, by `engine_load`, on the total weight of servers of several kinds; `weights`: of one server.
    `margins`: share by which rates on each kind are raised.

    A set of adapters on kind k weighs at least w_k max(Σ a, Σ b), with the rows a, b of `_busy_s`, hence at least
    w_k Σ ((1 − t) a + t b) for every t in [0, 1]. Each adapter weighs at least as much as on its best kind.
    """
    least = min(weights.values())
    factor = _load_factor(workload, 0.0)
    if factor is None:
        return least
    busy = [weight * (1.0 + margins[profile]) * engine_s(workload)(profile) for profile, weight in weights.items()]
    total = max(
        float(np.min([(1.0 - t) * first + t * second for first, second in busy], axis=0).sum())
        for t in np.linspace(0.0, 1.0, 11).tolist()
    )
    return max(least, total * factor)


def _load_factor(workload: Workload, margin: float, stable: bool = False) -> float | None:
    """Factor from the load to servers: a server that serves 0.9 of its load does not starve (a `stable` one serves all
    of it), the margin raises the load, and 5 % (10 %) are left for chance. None if arrivals do not have the fleet's
    mean rate, or if prompts share prefixes: a prefix in the KV cache takes no time."""
    arrivals = workload.arrivals
    if workload.shares_prefixes or arrivals.kind in ("trace", "unpredictable"):
        return None
    swing = arrivals.mean_factor
    return swing * (1.0 + margin) * (1.0 / _STABLE_SLACK if stable else STARVATION_THRESHOLD / _BOUND_SLACK)


def load_bound(
    workload: Workload, profile: Profile, margin: float, *, simulated: bool = True, stable: bool = False
) -> int:
    """Number of servers that any plan needs, by load alone, relative to the twin.

    No server serves more than the `lightest` one, and a server that serves less than 0.9 of its load starves. The bound
    comes from `engine_load` and, if `simulated` and all adapters have the same lengths and acceptance, also from an
    overloaded twin; both leave 5 % for chance. `stable`: every server must serve its whole load, 10 % are left for
    chance. 1 if arrivals do not have the fleet's mean rate, or prompts share prefixes.
    """
    factor = _load_factor(workload, margin, stable)
    if factor is None:
        return 1
    busy = engine_load(workload, profile)
    if simulated and len({(a.input_tokens, a.output_tokens, a.acceptance) for a in workload.adapters}) == 1:
        least = lightest(profile, int(workload.ranks.min()))
        tok_s = float(workload.rates @ _requests(workload, profile)[:2].sum(axis=0))
        busy = max(busy, tok_s / _most_tok_s(workload, least))
    return max(1, math.ceil(busy * factor))
