"""Simulate one server with a workload: the entry point of the twin."""

from __future__ import annotations

import math
from dataclasses import replace

from packer import checks
from packer.arrays import distinct
from packer.errors import IncompatibleError
from packer.goal import GoalLike
from packer.gpu import check_one_server
from packer.profile import Profile
from packer.public import public
from packer.times import HOUR_S
from packer.twin.memory.policy import kv_cache_tokens, memory_error
from packer.twin.run import Run
from packer.twin.server import Raw, Server
from packer.twin.tuning.policy import kv_tokens_of
from packer.twin.watch import Watch
from packer.workload import Workload

MAX_CONCURRENCY = 1_000_000  # Most requests that a client may keep open; one machine has 65,535 ports for each address.
MAX_BINS = 1_000_000


@public
def simulate(
    workload: Workload,
    profile: Profile,
    *,
    max_loras: int,
    max_lora_rank: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    max_outstanding: int | None = None,
    concurrency: int | None = None,
    paced: bool = False,
    timeline_bin_s: float = 10.0,
    mean_state: bool = False,
    scrape_interval_s: float | None = None,
    tuning: str | None = None,
    slo: GoalLike | None = None,
    watch: Watch | None = None,
) -> Run:
    """Simulate one vLLM server that serves this workload.

    `max_loras`, `max_lora_rank`: slots and their rank; None takes vLLM's smallest rank that holds every adapter.
    Without an adapter of rank > 0 the server runs with LoRA off, as with max_loras=0.
    `duration_s`: simulated time; requests not finished by then are unfinished. None takes an hour, or longer for whole
    cycles of piecewise rates, or the span of a replayed trace.
    `seed`: seed of arrivals and lengths.
    `max_outstanding`: further requests are refused and count as unfinished, as with a client of limited sockets.
    `concurrency`: closed loop with this number of requests always outstanding, as with
    `vllm bench serve --max-concurrency`. The rates then only say how often each adapter is chosen; a replayed trace is
    sent in its order, and the run ends with its last request, at the latest after `duration_s`.
    `paced`: requests come at their own times, and wait at the client while `concurrency` requests are outstanding. This
    wait is not part of latencies; those that wait at the end are `Run.held_back`.
    `timeline_bin_s`: resolution of the timeline.
    `mean_state`: also sum up the state that tokens see, `raw.means`, for calibration (`engine.charge.add_means`).
    `scrape_interval_s`: time between scrapes of /metrics/, which stop the front end; those of /metrics, without the
    last slash, cost less. None takes the profile's (`frontend.scrape_interval_s`), by default no scrapes at all.
    `tuning`: policy by which training shares the server, as in "llmstation:slo_decode_ms=45"; "none": the server does
    not train; None: the policy of the workload's job, if any. A workload without a job gets one of the default kind.
    `slo`: the goal of the service-level figures: a `packer.Goal`, its text ("p95_ttft_ms=500", which changes the
    workload's goal), or a mapping of limits; None: the workload's goal.
    `watch`: ends the run with a `packer.twin.watch.BrokenError` once limits are certainly broken.

    Raises `ValidationError`: a value is out of range, or no slot of this rank holds an adapter; `IncompatibleError`: no
    client behaves in this way, or the server has another base model than the adapters.
    """
    duration_s = simulated_s(workload, duration_s, timeline_bin_s, seed)
    check_one_server(workload, profile)
    if workload.n_loras:
        checks.integer("max_loras of a server with adapters", max_loras, low=1)
    settings = profile.settings(max_loras if workload.n_loras else 0, workload.slot_rank(max_lora_rank))
    check_client(workload, max_outstanding, concurrency, paced)
    queue = profile.engine.max_num_queued_reqs
    if concurrency is not None and queue is not None and concurrency > queue:
        rule = f"Expected a concurrency up to the server's max_num_queued_reqs ({queue}), got {concurrency}:"
        raise IncompatibleError(f"{rule} it would refuse requests of a client that waits for them.")
    if scrape_interval_s is not None:
        profile = replace(profile, frontend=replace(profile.frontend, scrape_interval_s=scrape_interval_s))
    if tuning is not None:
        workload = workload.tuned_by(tuning)
    workload = workload.held_to(slo)
    reserved = kv_tokens_of(workload.fine_tuning, profile)
    kv_tokens = kv_cache_tokens(profile, settings, workload, reserved)
    reason = memory_error(profile, settings, workload, reserved)
    raw = Raw.nothing(len(workload))
    if reason is None:
        server = Server(workload, profile, settings, kv_tokens, max_outstanding, mean_state, concurrency, paced, watch)
        if server.longest_request() >= 2:
            raw = server.run(duration_s, seed, float(timeline_bin_s))
            closed = concurrency is not None and not paced
            if closed and (end_s := ended_s(workload, raw)) < duration_s:
                duration_s, raw = end_s, server.run(end_s, seed, float(timeline_bin_s))
        else:
            reason = f"the KV cache of {kv_tokens} tokens can't hold the largest adapter and a request"
    return Run(
        "ok" if reason is None else "memory_error", reason or "", workload, profile, settings,
        duration_s, seed, kv_tokens, raw, timeline_bin_s, concurrency, paced, max_outstanding=max_outstanding,
    )  # fmt: skip


def simulated_s(workload: Workload, duration_s: float | None, timeline_bin_s: float, seed: int) -> float:
    """Return how long to simulate, s; raises `ValidationError` for a time or seed out of range."""
    duration_s = workload.arrivals.whole_s(HOUR_S) if duration_s is None else duration_s
    checks.real("duration_s", duration_s, low=0.0, high=1e8, open_low=True)
    checks.real("timeline_bin_s", timeline_bin_s, low=duration_s / MAX_BINS)
    checks.integer("seed", seed, low=0)
    return float(duration_s)


def check_client(
    workload: Workload, max_outstanding: int | None, concurrency: int | None = None, paced: bool = False
) -> None:
    """Raise `IncompatibleError` if no client behaves so, or `ValidationError` for a number out of range."""
    if max_outstanding is not None:
        checks.integer("max_outstanding", max_outstanding, low=1, high=checks.MOST_COUNT)
    if concurrency is not None:
        checks.integer("concurrency", concurrency, low=1, high=MAX_CONCURRENCY)
    if paced and concurrency is None:
        raise IncompatibleError("paced has no effect without concurrency: expected both, or neither.")
    if concurrency is not None and max_outstanding is not None:
        raise IncompatibleError("A client refuses requests (max_outstanding) or holds them back (concurrency).")
    if concurrency is not None and not paced and _sends_turns(workload):
        rule = "Turns of sessions come at their own times: expected paced beside concurrency,"
        raise IncompatibleError(f"{rule} or no concurrency.")


def ended_s(workload: Workload, raw: Raw) -> float:
    """Return when the last request of a replayed trace completed, s; infinite if not all did, or without a trace."""
    trace = workload.arrivals.trace
    if trace is None or not len(trace) or int(raw.finished.sum()) < len(trace):
        return math.inf
    return float(raw.finish_s.max())


def _sends_turns(workload: Workload) -> bool:
    """Whether later turns of sessions are drawn or replayed."""
    trace = workload.arrivals.trace
    if trace is None or trace.sessions is None:
        return workload.has_sessions
    return len(distinct(trace.sessions * len(workload) + trace.adapter)) < len(trace)
