"""Build the memory of the simulated servers from kinds of server and a system."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from packer import checks
from packer.memo import cached_property
from packer.arrays import FloatArray, IntArray
from packer.cluster import Cluster, ServerKind
from packer.engines import VLLM, engine_of
from packer.errors import IncompatibleError
from packer.profile import LoadingSpec
from packer.twin.arrivals import Marks
from packer.twin.cluster.caching import FIXED, LRU, CachePolicy, TickingPolicy
from packer.twin.cluster.ahead import idle_ahead
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.client import new_client
from packer.strategies import Engine
from packer.twin.cluster.state import EngineKernels, Engines, Servers, number, pair_places, whole_of, with_more_rows
from packer.twin.cluster.system import System
from packer.twin.engine import state as rows
from packer.twin.law.kernels import with_kernel
from packer.twin.law.law import Law, law_of
from packer.twin.memory.policy import kv_cache_tokens, memory_error
from packer.twin.server import Server
from packer.twin.tuning.policy import kv_tokens_of, trains
from packer.twin.tuning.state import Tuning, no_tuning
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.twin.cluster.dispatch import Dispatch


@dataclass(frozen=True)
class Setup:
    """A configuration of a server, with the adapters that it may serve.

    `loading`: name of the strategy by which adapters come to the GPU. `served` (k,): numbers of these adapters in the
    fleet, ascending; servers with the same adapters share the array. `sharing`: number of servers on its machine.
    """

    server: Server
    engine: Engine
    policy: CachePolicy
    loading: str
    served: IntArray
    sharing: int = 1

    @cached_property
    def blocks(self) -> IntArray:
        """Cells of the pool that each adapter takes when it is loaded to the GPU, int64 (k,)."""
        own = self.server.adapter_blocks()
        return np.zeros_like(own) if self.policy.rule == FIXED else own

    @property
    def cells(self) -> int:
        """Cells of the pool, without those of adapters that never leave."""
        pinned = self.policy.rule == FIXED and self.policy.takes_memory
        return self.server.kv_blocks - (int(self.server.adapter_blocks().sum()) if pinned else 0)

    def longest_request(self) -> int:
        """Input + output tokens of the longest request that the server takes; longer ones are cut."""
        return self.engine.longest_request(self)

    def error(self) -> str | None:
        """Return why the server does not start, as a message; None if it starts."""
        profile = self.server.profile
        reserved = kv_tokens_of(self.server.workload.fine_tuning, profile)
        reason = memory_error(profile, self.server.settings, self.server.workload, reserved)
        if reason is None and self.cells < int(self.blocks.max()):
            reason = f"the adapters' memory of {self.cells} cells can't hold what must be in it"
        if reason is None and self.longest_request() < 2:
            held = f"the KV cache of {self.server.kv_cache_tokens} tokens"
            reason = f"{held} can't hold the largest adapter and a request"
        return reason

    def state(self, duration_s: float, bin_s: float, seed: int) -> rows.ServerState:
        """The idle server, without rows for requests."""
        none = np.zeros(0, dtype=np.int64)
        state = self.server.state(Marks(none, none, none), duration_s, bin_s, seed)
        prepared: rows.ServerState = self.engine.prepare(self, state)
        return prepared


OFF: dict[str, Any] = {"block_size": 1, "prefix_caching": False, "async_scheduling": False, "max_num_queued_reqs": None}
"""Values of vLLM's settings for an engine that does not read them."""


def kind_setup(workload: Workload, kind: ServerKind, system: System, policy: CachePolicy) -> Setup:
    """Return the setup of a kind of server in a system, as if it served the whole fleet; `policy`: of all kinds. Raises
    `IncompatibleError`: the engine does not support the system or the workload; `ValidationError`: the kind has no
    slots, and the workload has adapters."""
    if workload.n_loras:
        checks.integer("max_loras of a server with adapters", kind.max_loras, low=1)
    engine = kind.engine if system.engine is None else engine_of(system.engine)
    loading, profile = system.loading or "blocking", kind.profile
    checks.real(f"cv of the engine {engine.name!r}", engine.cv, low=0.0)
    reason = engine.refusal(policy.name, loading, profile.latency.form)
    if reason is not None:
        raise IncompatibleError(f"{reason} ({profile.name}).")
    if system.memory is not None:
        profile = replace(profile, memory=replace(profile.memory, policy=system.memory))
    if system.kernel is not None:
        profile = with_kernel(profile, system.kernel)
    if not isinstance(engine, type(VLLM)):
        if profile.engine.scheduling_policy != "fcfs" or profile.engine.speculation is not None:
            rule = "Only vLLM's engine has priorities and speculative decoding,"
            raise IncompatibleError(f"{rule} and not {engine.name!r}.")
        unread = {name: off for name, off in OFF.items() if name in engine.unread}
        profile = replace(profile, engine=replace(profile.engine, **unread))
    if workload.n_loras < len(workload) and not engine.serves_base:
        rule = "Only vLLM's engine serves requests without an adapter (rank 0),"
        raise IncompatibleError(f"{rule} and not {engine.name!r}.")
    if trains(workload.fine_tuning) and not engine.trains:
        raise IncompatibleError(f"Only vLLM's engine trains beside its requests, and not {engine.name!r}.")
    if loading == "none" or policy.rule == FIXED:
        profile = replace(profile, loading=LoadingSpec(spares_batch=profile.loading.spares_batch))  # loads take no time
    settings = profile.settings(kind.max_loras, kind.max_lora_rank or workload.slot_rank())
    tokens = kv_cache_tokens(profile, settings, workload, kv_tokens_of(workload.fine_tuning, profile))
    server = Server(workload, profile, settings, tokens, None)
    return Setup(server, engine, policy, loading, np.arange(len(workload)))


def server_setups(
    workload: Workload, cluster: Cluster, kinds: Mapping[str, Setup], candidates: Candidates
) -> list[Setup]:
    """Return the setup of each server with its adapters; servers of one kind with the same adapters share a setup."""
    groups = candidates.groups_of_servers(len(cluster))
    sharing = [n for node in cluster.nodes for n in [node.servers] * node.servers] or [1] * len(cluster)
    keys = list(zip(cluster.servers, groups, sharing, strict=True))
    found: dict[tuple[str, tuple[int, ...], int], Setup] = {}
    for kind, served, beside in keys:
        if (kind, served, beside) not in found:
            own = np.flatnonzero(np.isin(candidates.group, served))
            # A fleet has at least one adapter: a server that serves none is set up for all of them.
            whole = len(own) in (0, len(workload))
            subset = workload if whole else workload.subset(own.tolist())
            setup, server = kinds[kind], kinds[kind].server
            settings, profile = server.settings, server.profile
            if not subset.n_loras:  # LoRA is off
                settings = profile.settings(0, settings.max_lora_rank)
            tokens = kv_cache_tokens(profile, settings, subset, kv_tokens_of(workload.fine_tuning, profile))
            server = replace(server, workload=subset, settings=settings, kv_cache_tokens=tokens)
            found[kind, served, beside] = replace(
                setup, server=server, served=np.arange(len(workload)) if whole else own, sharing=beside
            )
    return [found[key] for key in keys]


def idle_servers(
    work: Dispatch, kinds: Mapping[str, Setup], own: Sequence[Setup], time_s: FloatArray, marks: Marks, rows_each: int
) -> tuple[Servers, Engines]:
    """Return the servers before the first request, and their engines; `rows_each`: rows for adapters of a server."""
    cluster, duration_s, seed = work.cluster, work.duration_s, work.seed
    n, count = len(time_s), len(own)
    setups = {id(setup): setup for setup in own}
    made = {key: setup.state(duration_s, work.bin_s, seed) for key, setup in setups.items()}
    states = [made[id(setup)] for setup in own]
    longest = {key: setup.longest_request() for key, setup in setups.items()}
    ranks = next(iter(kinds.values())).server.workload.ranks
    ring = rows.ring_of(int(marks.output_tokens.max()) if n else 1)
    distinct, rank_class = np.unique(ranks, return_inverse=True)
    classes = np.zeros((count, len(distinct) + 1), dtype=rows.RANKS)
    classes["rank"][:, 1:] = distinct
    records = np.array([state.server for state in states], dtype=rows.SERVER)
    records["ring"], records["sentinel"] = ring, n + ring * np.arange(count)
    # A policy may keep an adapter on a server that gets no request for it.
    kept = count * len(ranks) if any(isinstance(setup.policy, TickingPolicy) for setup in own) else 0
    pairs = pair_places(min(n + kept, count * min(rows_each, len(ranks))))
    touched = np.ones(-(-count // 8) * 8, dtype=np.int8)
    # Servers that may serve the same adapters share one list of them.
    lists = {id(setup.served): (setup.served, state) for setup, state in zip(own, states, strict=True)}
    ends = dict(zip(lists, np.cumsum([len(served) for served, _ in lists.values()]).tolist(), strict=True))
    last = np.array([ends[id(setup.served)] for setup in own], dtype=np.int64)
    names, tuning = list(kinds), _tuning(own, seed)
    laws = [law_of(setup.server.profile) for setup in kinds.values()]
    # One array for all servers: if one of them may evict adapters, every server walks over its batch.
    walks = any(state.members.size > 1 for state in states)
    places = max(rows.walk_places(int(state.server.slots)) for state in states) if walks else 1
    requests = rows.zeros((n,), rows.REQUEST)
    servers = Servers(
        servers=records,
        whole=whole_of(records),
        live=records,
        requests=requests,
        trees=requests if records["skipped_reversed"].any() else None,
        links=rows.new_links(n, ring, count),
        adapters=rows.zeros((count, rows_each + 1), rows.ADAPTER),  # untouched rows take no memory
        heaps=np.zeros((count, 2, rows_each), dtype=rows.PLACED),
        sets=np.zeros((count, 2, places), dtype=np.int64),
        members=np.zeros((count, places), dtype=rows.MEMBER),
        series=np.zeros((count, max(state.series.size for state in states)), dtype=np.int64),
        classes=classes,
        phase=np.zeros((count, max(state.phase.size for state in states)), dtype=np.int64),
        ends=np.zeros((count, ring), dtype=np.int8),
        histogram=np.zeros((count, rows.HISTOGRAM_BINS), dtype=np.int64),
        timeline=np.zeros((count, len(states[0].timeline)), dtype=rows.BIN),
        vector=np.zeros((count, states[0].vector.size)),
        nothing=np.zeros(0),
        law=Law(*map(np.stack, zip(*laws, strict=True))),
        # A replayed trace is read-only, which is another Numba type: kernels would be recompiled for it.
        sent_s=np.require(time_s, np.float64, ["C", "W"]) if work.concurrency is None else np.full(n, np.inf),
        adapter=np.require(marks.adapter, np.int64, ["C", "W"]),
        prompt=np.require(marks.input_tokens, np.int64, ["C", "W"]),
        output=np.require(marks.output_tokens, np.int64, ["C", "W"]),
        server=np.full(n, -1, dtype=np.int64),
        longest=np.array([longest[id(setup)] for setup in own], dtype=np.int64),
        kind=np.array([names.index(kind) for kind in cluster.servers], dtype=np.int64),
        ranks=np.array(ranks),
        rank_class=rank_class.ravel().astype(np.int64) + 1,
        first=last - np.array([len(setup.served) for setup in own], dtype=np.int64),
        last=last,
        served=np.concatenate([served for served, _ in lists.values()]),
        words=np.concatenate(
            [np.column_stack([state.adapters["hash"], state.adapters["words"]])[1:] for _, state in lists.values()]
        ),
        blocks=np.stack([setup.blocks for setup in kinds.values()]),
        seen=np.zeros(count, dtype=np.int64),
        pair_key=np.zeros(pairs, dtype=np.int64),
        pair_row=np.zeros(pairs, dtype=np.int32),
        wake_s=np.full(count, np.inf),
        touched=touched,
        touched_words=touched.view(np.int64),
        on_way=np.zeros(count, dtype=np.int64),
        tuning=no_tuning(count) if tuning is None else tuning,
        client=new_client(work.concurrency or 0, count, np.require(time_s, np.float64, ["C", "W"])),
        ahead=idle_ahead([setup.server for setup in own], marks),
        others=tuple(kernels.memory(own, rows_each) for kernels in kernels_of(own)),
    )
    for setup in kinds.values():
        if setup.server.profile.engine.scheduling_policy == "priority":
            servers.requests["context"] = setup.server.priorities(marks)
    if work.way is None:
        servers = _prepared(servers, own)
    others = engines_of(own)
    numbers = np.array([others.index(type(setup.engine)) for setup in own], dtype=np.int64)
    if numbers.any():
        servers.requests["last_s"] = _noise(own, n, seed)
    if not numbers.any() and not trains(own[0].server.workload.fine_tuning):
        return servers, None
    if servers.ahead is not None:
        rule = "Expected all servers of one engine where some schedule ahead or cache prefixes, got several: set"
        raise IncompatibleError(f"{rule} engine.async_scheduling and engine.prefix_caching to false in their profiles.")
    return servers, numbers


def _prepared(servers: Servers, own: Sequence[Setup]) -> Servers:
    """Return the servers with the adapters that vLLM's host memory and front ends have before the first request, if
    these keep some of a server's adapters but not all."""
    for s, setup in enumerate(own):
        plain = type(setup.engine) is type(VLLM) and setup.policy.rule == LRU
        if plain and any(setup.server.prepared(servers.servers[s])):
            while servers.heaps.shape[2] < len(setup.served):
                servers = with_more_rows(servers)
            for a in setup.served.tolist():
                number(servers, s, a)
            setup.server.prepare(servers.servers[s], servers.adapters[s])
    return servers


def engines_of(own: Sequence[Setup]) -> list[type[Engine]]:
    """Return the engine classes of these servers: vLLM's, then others by name."""
    found = {type(setup.engine) for setup in own} - {type(VLLM)}
    return [type(VLLM), *sorted(found, key=lambda kind: kind.__name__)]


def kernels_of(own: Sequence[Setup]) -> tuple[EngineKernels, ...]:
    """Return the kernels of the engines other than vLLM's, in the order of `engines_of`."""
    first = {type(setup.engine): setup.engine for setup in own}
    return tuple(first[kind].kernels() for kind in engines_of(own)[1:])


def _tuning(own: Sequence[Setup], seed: int) -> Tuning | None:
    """Return what each server trains: the same job, with samples of the same lengths; None without a job."""
    found = {id(setup): setup.server.tuning(seed) for setup in own}
    jobs = [found[id(setup)] for setup in own]
    first = jobs[0]
    if first is None:
        return None
    return Tuning(np.stack([job.job for job in jobs if job is not None]), first.lengths)


def _noise(own: Sequence[Setup], n: int, seed: int) -> FloatArray | float:
    """Return the factor on the service time of each job, (n,): log-normal with mean 1, the same for all systems."""
    cv = max(setup.engine.cv for setup in own)
    if cv == 0.0:
        return 1.0
    variance = math.log1p(cv * cv)
    rng = np.random.default_rng((seed, 0x6E6F6973))
    return np.exp(rng.normal(-variance / 2, math.sqrt(variance), n))
