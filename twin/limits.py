"""What limits a server in a simulation, and what would help; whether its slots thrash, and how many slots end that."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from packer.arrays import BoolArray, FloatArray
from packer.checks import slot_rank_for
from packer.errors import ValidationError
from packer.profile import Profile
from packer.twin.law.law import law_of
from packer.twin.memory.policy import kv_cache_tokens, memory_error
from packer.twin.override import with_engine
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.twin.stability import FEW
from packer.twin.tuning.policy import kv_tokens_of
from packer.words import counted
from packer.workload import Workload

USED_UP = 0.5  # A resource of which less than this share is in use limits nothing on average.
FULL = 0.8  # A KV cache of which more is in use has no room for the requests of more slots.
SELDOM = 0.01  # Requests that wait in less of the time than this do not make latencies.
HELD_BACK = 2.0  # Gaps between tokens that are longer than the engine's by this factor come from the API server.
GROWTH = 1.5  # Factor by which advice, and each step of a search, increases the slots.
CHANCE, LESS = 0.01, 0.1  # By more than these shares slots serve more, or use less of the limits, if they help.
START_S = 300.0  # Time after the start in which adapters are used for the first time, s.
MOSTLY = 0.95  # Share of late requests that keep their limit without first uses: enough for a p95 within it.
BEFORE_TRAFFIC = "a request to each adapter before a server takes traffic avoids that (--warm-start true)"
MOST_LOADS = 1.0  # Loads per request that a cold cache explains; vLLM needs more if it evicts adapters of the batch.


class Limit(NamedTuple):
    """A scarce resource: its name, the share in use, that share in words, and what would help."""

    name: str
    pressure: float
    usage: str
    advice: str


def limit_of(sim: Run, help_: Callable[..., bool] | None = None) -> Limit:
    """Return the resource of a server that is used most while requests wait. `help_`: whether a setting (`max_loras=48`
    or `max_num_seqs=512`) helps, asked before it is advised; None: it is not known.

    Compared are the slots (if there are fewer than adapters), the KV cache, `max_num_seqs`, the token budget of a step,
    the share of the time that loads take, the ITL relative to its limit (for the time of a step), the share of the TTFT
    that passes outside the engine (all of it if most does, for longer than the limit), and, if the server refuses
    requests, the places of `max_num_queued_reqs` that run: all of them if hardly any request waits. If less than
    `USED_UP` of each is in use, requests wait because they come together; if they seldom wait, the steps alone take too
    long. If requests wait longer than their limit only in the first `START_S` (and first half) of the run, or only
    because of the first uses of adapters, the start or these first uses limit the server. A closed loop sends its first
    requests at once, so that its start says nothing about the server.
    """
    sent_s, waits_ms = sim.late
    served = sim.stable and sim.mean_itl_ms <= sim.workload.slo.columns(sim.workload)[1].min()
    if served and sent_s.size and not sim.profile.engine.warm_start:
        waits = f"wait up to {waits_ms.max() / 1e3:.1f} s"
        early = starting(sent_s, sim.workload) & (sent_s < sim.duration_s / 2.0)
        if early.all() and not sim.closed_loop:
            usage = f"requests of the first {sent_s.max():.0f} s {waits}"
            return Limit("start", 1.0, usage, BEFORE_TRAFFIC)
        if _of_first_uses(sim, sent_s, waits_ms):
            return Limit("first use", 1.0, f"first requests of adapters {waits}", BEFORE_TRAFFIC)
    limits = _limits(sim)
    found = max(limits, key=lambda each: each.pressure)
    if found.name in ("slots", "loading"):
        (cache,) = (each.pressure for each in limits if each.name == "KV cache")
        found = found._replace(advice=_more_slots(sim, cache, help_))
    elif found.name == "batch":
        more = 2 * sim.profile.engine.max_num_seqs
        helps = help_ is None or help_(max_num_seqs=more)
        found = found._replace(advice=f"max_num_seqs {more}" if helps else "fewer requests per GPU")
    if found.pressure >= USED_UP or not sim.completed:
        return found
    waiting = sim.raw.timeline["waiting"] / sim.timeline_bin_s
    share = (waiting >= 1.0).mean()
    if share < SELDOM:
        (step,) = (each for each in limits if each.name == "step time")
        return step._replace(usage=f"TTFT {sim.mean_ttft_ms:.0f} ms almost without waiting, {step.usage}")
    usage = f"requests wait in {share:.0%} of the time, up to {waiting.max():.0f} at once"
    return Limit("bursts", found.pressure, usage, "fewer requests per GPU, or hot adapters on more GPUs")


def client_limit(sim: Run) -> Limit | None:
    """Return the client's limit of open requests if it keeps requests from servers that have room for more, else None.
    The servers have room if no queue stands before them and gaps between tokens are within their limit."""
    most, queue = (sim.concurrency if sim.paced else sim.max_outstanding, sim.profile.engine.max_num_queued_reqs)
    servers = len(sim.servers)
    # If the servers' queues are shorter than the client's limit, the servers refuse first.
    if most is None or (queue is not None and queue * servers < most):
        return None
    kept = sim.held_back if sim.paced else sim.refused_by_client
    if not kept or sim.stable:
        return None
    if sim.mean_waiting > FEW * servers or sim.mean_itl_ms > sim.workload.slo.columns(sim.workload)[1].min():
        return None
    name, verb = ("concurrency", "holds back") if sim.paced else ("max_outstanding", "refuses")
    usage = f"it keeps at most {counted(most, 'request')} open and {verb} {kept:,} of {sim.sent:,}"
    return Limit("client", 1.0, usage, f"a higher {name}")


def starting(sent_s: npt.NDArray[np.floating[Any]], fleet: Workload) -> BoolArray:
    """Which requests, by `sent_s`, are late because a server had just started; none if rates change."""
    steady = fleet.arrivals.kind in ("poisson", "lognormal")
    return np.asarray((sent_s < START_S) & steady)


def _of_first_uses(sim: Run, sent_s: FloatArray, waits_ms: FloatArray) -> bool:
    """Whether `MOSTLY` of the late requests would keep their TTFT limit without the time in which first uses of
    adapters, one by one, occupied the API server while they waited. `sent_s`, `waits_ms`: `Run.late`."""
    use_s, requests = law_of(sim.profile).frontend["per_first_use_s"], sim.raw.requests
    first_s = np.full(len(sim.workload), np.inf)
    np.minimum.at(first_s, requests.adapter, requests.time_s)
    first_s.sort()
    before_s = use_s * np.arange(len(first_s))
    # First uses wait for each other: end(k) = max(first(k), end(k - 1)) + use.
    end_s = np.append(-np.inf, np.maximum.accumulate(first_s - before_s) + before_s + use_s)
    limit_ms = sim.workload.slo.columns(sim.workload)[0][sim.owners]
    at_s = sent_s + np.array([[0.0], [1e-3]]) * waits_ms  # sent, first token
    count = np.searchsorted(first_s, at_s, side="right")
    # Time spent in first uses until t: that of all begun ones, without what is left of the last one.
    within_ms = 1e3 * np.diff(use_s * count - np.maximum(end_s[count] - at_s, 0.0), axis=0)[0]
    return bool((waits_ms - within_ms <= limit_ms[sim.ttft_ms > limit_ms]).mean() >= MOSTLY)


def _limits(sim: Run) -> list[Limit]:
    """The resources; the advice for slots, loads and the batch, which may be simulated, is left to `limit_of`."""
    engine, raw = sim.profile.engine, sim.raw
    if sim.status != "ok":
        return [Limit("memory", 1.0, sim.status_reason, _smaller_slots(sim) or "fewer or smaller slots")]
    waiting = raw.timeline["waiting"] >= sim.timeline_bin_s  # one request on average
    # What is scarce shows while requests wait.
    crowded = raw.timeline[waiting] if waiting.any() else raw.timeline
    busy_s = max(float(crowded["busy"].sum()), 1e-9)
    active, running, blocks = (float(crowded[name].sum()) / busy_s for name in ("adapters", "running", "kv_blocks"))
    kv = blocks * engine.block_size / max(sim.kv_cache_tokens, 1)
    loading = float(raw.server["load_s"]) / max(float(raw.server["busy_s"]), 1e-9)
    tokens = float(raw.timeline["prefill"].sum() + raw.timeline["decode"].sum()) / max(sim.engine_steps, 1)
    _, itl_limits_ms = sim.workload.slo.columns(sim.workload)
    itl = sim.mean_itl_ms if math.isfinite(sim.mean_itl_ms) else 0.0
    # Answers that a busy API server holds back are not slow steps.
    itl = sim.engine_mean_tpot_ms if itl > HELD_BACK * sim.engine_mean_tpot_ms else itl
    found = [
        Limit("KV cache", kv, f"{kv:.0%} of {sim.kv_cache_tokens:,} tokens", _more_cache(sim)),
        Limit("batch", running / engine.server_seqs, f"{running:.0f} of {engine.server_seqs} requests run", ""),
        Limit(
            "prefill", tokens / engine.server_tokens,
            f"{tokens:,.0f} of {engine.server_tokens:,} tokens a step",
            "fewer requests per GPU",
        ),
        Limit("loading", loading, f"{loading:.0%} of the time goes into loading adapters", ""),
        Limit(
            "step time", itl / float(itl_limits_ms.min()),
            f"ITL {itl:.0f} ms with {counted(round(running), 'request')} running", "fewer requests per GPU",
        ),
    ]  # fmt: skip
    if sim.completed:
        outside_ms = sim.mean_ttft_ms - sim.engine_mean_ttft_ms
        usage = f"{outside_ms:,.0f} of {sim.mean_ttft_ms:,.0f} ms of the TTFT pass in the API server"
        few = raw.server["tokenizer_places"] > 0
        advice = f"max_num_seqs {sim.workload.n_loras}, for their tokenizers, or " if few else ""
        advice += "fewer adapters per GPU"
        share = outside_ms / max(sim.mean_ttft_ms, 1e-9)
        full = share > USED_UP and outside_ms > sim.workload.slo.columns(sim.workload)[0].min()
        found.insert(0, Limit("front end", 1.0 if full else share, usage, advice))
    if sim.max_loras < sim.workload.n_loras:
        slots = active / sim.max_loras
        found.append(Limit("slots", slots, f"{active:.0f} of {sim.max_loras} in use", ""))
    queue, refused = engine.max_num_queued_reqs, sim.refused_by_server
    if queue is not None and refused:
        waits = float(crowded["waiting"].mean()) / sim.timeline_bin_s
        room = waits <= min(FEW, running) and itl <= float(itl_limits_ms.min())
        usage = f"at most {counted(queue, 'request')} wait or run, {refused:,} of {sim.sent:,} are refused"
        share = 1.0 if room else running / queue
        found.append(Limit("queue limit", share, usage, f"max_num_queued_reqs {2 * queue}"))
    return found


def _more_slots(sim: Run, cache: float, help_: Callable[..., bool] | None) -> str:
    """Return advice in words: a number of slots that helps; if it does not fit, what makes room for it. `cache`: the
    share of the KV cache in use. More slots, whose requests need more of it, do not help once it is `FULL`."""
    slots = min(len(sim.workload), math.ceil(GROWTH * sim.max_loras))
    if slots <= sim.max_loras:
        return "fewer adapters per GPU"
    trained = kv_tokens_of(sim.workload.fine_tuning, sim.profile)
    why_not = memory_error(sim.profile, sim.profile.settings(slots, sim.max_lora_rank), sim.workload, trained)
    full = cache * sim.kv_cache_tokens > FULL * _room(sim, slots, sim.max_lora_rank)
    if why_not or full:
        return _smaller_slots(sim) or "fewer adapters per GPU"
    return f"max_loras {slots}" if help_ is None or help_(max_loras=slots) else "fewer adapters per GPU"


def setting_helps(sim: Run, max_loras: int | None = None, **engine: int) -> bool:
    """Whether the same run with another number of slots, or other settings (`packer.twin.override.with_engine`), serves
    more, or is less beyond its goal, than chance explains. Settings that break a rule do not help."""
    try:
        again = _changed(sim, with_engine(sim.profile, **engine), max_loras or sim.max_loras)
    except ValidationError:
        return False
    served = again.served_share - sim.served_share
    if sim.closed_loop:  # which sends as much as the server answers
        served = again.total_token_throughput / max(sim.total_token_throughput, 1e-9) - 1.0
    if again.status != "ok" or served < -CHANCE:
        return False
    return served > CHANCE or again.slo_used < (1.0 - LESS) * sim.slo_used


def _changed(sim: Run, profile: Profile, slots: int) -> Run:
    """Return the same run of a server with another profile and number of slots."""
    return simulate(
        sim.workload, profile, max_loras=slots, max_lora_rank=sim.max_lora_rank, duration_s=sim.duration_s,
        seed=sim.seed, max_outstanding=sim.max_outstanding, concurrency=sim.concurrency, paced=sim.paced,
    )  # fmt: skip


def _more_cache(sim: Run) -> str:
    """Return advice in words: drop unused slots, or adapters of large ranks, which take memory from the KV cache."""
    fewer, peak = "", len(sim.workload)
    if peak < sim.max_loras:
        fewer = f"max_loras {peak} gives {_room(sim, peak, sim.max_lora_rank):,} tokens"
    return " or ".join(filter(None, (fewer, _smaller_slots(sim)))) or "fewer requests per GPU"


def _smaller_slots(sim: Run) -> str:
    """Return advice to move the adapters of the largest rank away, if they are the minority and slots get smaller."""
    ranks = sim.workload.ranks
    largest = int(ranks.max())
    others = ranks[ranks < largest]
    few = len(ranks) - len(others)
    if not others.size or few > len(others) or slot_rank_for(int(others.max())) >= sim.max_lora_rank:
        return ""
    gained = _room(sim, sim.max_loras, slot_rank_for(int(others.max()))) - max(sim.kv_cache_tokens, 0)
    which = "adapter" if few == 1 else f"{few} adapters"
    return f"moving the {which} of rank {largest} away (+{gained:,} KV tokens)" if gained > 0 else ""


def _room(sim: Run, slots: int, rank: int) -> int:
    """KV cache of the server with other slots, in the tokens of its requests, without what training takes."""
    profile, fleet = sim.profile, sim.workload
    return kv_cache_tokens(profile, profile.settings(slots, rank), fleet, kv_tokens_of(fleet.fine_tuning, profile))


def thrashes(sim: Run) -> bool:
    """Whether an average request makes the server load more than one adapter, and not only as adapters come first."""
    if sim.status != "ok" or not sim.loads_per_request > MOST_LOADS:
        return False
    return any(server.adapter_loads > server.workload.n_loras for server in sim.servers)


def relief(sim: Run) -> Run | None:
    """Return the run with the fewest slots, in steps of half as many more, that do not thrash; None without any."""
    slots, n = sim.max_loras, len(sim.workload)
    while slots < n:
        slots = min(math.ceil(GROWTH * slots), n)
        settings = sim.profile.settings(slots, sim.max_lora_rank)
        if memory_error(sim.profile, settings, sim.workload) is not None:
            return None
        again = _changed(sim, sim.profile, slots)
        if again.status == "ok" and not thrashes(again):
            return again
    return None
