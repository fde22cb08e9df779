"""The state of the servers for routers written in Python."""

from __future__ import annotations

import numpy as np
from numba import njit

from packer.arrays import BoolArray, FloatArray, IntArray
from packer.cluster import Cluster
from packer.twin.cluster.candidates import Candidates
from packer.twin.cluster.routers.step_cost import step_ms
from packer.twin.cluster.state import Servers, on_gpu
from packer.twin.engine import state as rows
from packer.twin.flags import ENGINE_FLAGS
from packer.workload import Workload


@njit(**ENGINE_FLAGS)
def _holders(c: Servers, a: int, held: BoolArray) -> None:
    """Mark the servers that hold adapter `a` on the GPU."""
    for s in range(held.size):
        held[s] = on_gpu(c, s, a)


class ClusterView:
    """The state of the servers during the steps in flight, int64 (S,) each; nothing about the future. A batch is as it
    was scheduled; requests given to a server since then count as waiting."""

    def __init__(
        self, cluster: Cluster, workload: Workload, candidates: Candidates, servers: Servers,
        on: BoolArray | None = None,
    ) -> None:  # fmt: skip
        self.cluster, self.workload = cluster, workload
        self.on = np.ones(len(cluster), dtype=np.bool_) if on is None else on
        """Servers that get requests now, bool (S,)."""
        self._servers = servers
        self.allow(candidates)

    def follow(self, servers: Servers) -> None:
        """Read these servers from now on: the event loop got larger arrays."""
        self._servers = servers

    def allow(self, candidates: Candidates) -> None:
        """Let servers serve these adapters from now on, after changes."""
        self._candidates = candidates
        self._sets: dict[int, frozenset[int]] = {}

    def _field(self, name: str) -> IntArray:
        found: IntArray = self._servers.servers[name].copy()
        return found

    def requests_since(self, after_s: float, until_s: float) -> FloatArray:
        """Requests of each adapter that arrived in [after_s, until_s[, float64 (m,)."""
        first, last = np.searchsorted(self._servers.sent_s, [after_s, until_s])
        counts = np.bincount(self._servers.adapter[first:last], minlength=len(self.workload))
        return counts.astype(np.float64)

    def sampled_since(self, after_s: FloatArray, until_s: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Requests, prompt and output tokens of each server in [after_s (S,), until_s[, float64 (S,) each."""
        first, last = np.searchsorted(self._servers.sent_s, [after_s.min(), until_s])
        first = min(first, last)
        server = self._servers.server[first:last]
        kept = np.flatnonzero(server >= 0)
        kept = kept[self._servers.sent_s[first:last][kept] >= after_s[server[kept]]]

        def total(values: FloatArray) -> FloatArray:
            return np.bincount(server[kept], values[kept], len(after_s)).astype(np.float64)

        tokens = (each[first:last].astype(np.float64) for each in (self._servers.prompt, self._servers.output))
        prompt, output = map(total, tokens)
        return total(np.ones(last - first)), prompt, output

    def is_unfinished(self, requests: IntArray) -> BoolArray:
        """Return which of these requests, by number, are not finished."""
        left: BoolArray = self._servers.requests["status"][requests] != rows.FINISHED
        return left

    def blocks_of(self, requests: IntArray) -> IntArray:
        """Return the KV blocks of these requests' prompts and generated tokens; -1: no engine has accepted the request.
        Only engines that count tokens request by request (`packer.papers.dlora`) know the generated tokens."""
        known = self._servers.requests[requests]
        size = self._field("block_size")[self._servers.server[requests]]
        blocks = -(-(known["prompt"] + known["generated"]) // size)
        return np.where((known["status"] == rows.ACCEPTED) & ~np.isnan(known["reached_s"]), blocks, -1)

    def served_s(self, adapter: int) -> float:
        """Mean time from the first token to the last of an adapter's finished requests, s; NaN without one."""
        own = self._servers.requests[self._servers.adapter == adapter]
        done = own[own["status"] == rows.FINISHED]
        return float(np.mean(done["finish_s"] - done["first_s"])) if len(done) else np.nan

    @property
    def adapter_bytes(self) -> FloatArray:
        """Weights of each adapter, float64 (m,)."""
        return self.workload.ranks.astype(np.float64) * self.cluster.kind(0).profile.model.lora_bytes_per_rank

    def service_s(self, iterations: int, adapter: int) -> FloatArray:
        """Return the time of a job of `iterations` on each server, without loading its adapter, float64 (S,)."""
        rank, names = float(self.workload.ranks[adapter]), self.cluster.servers
        first = {name: names.index(name) for name in set(names)}
        found = {
            name: float(step_ms(self._servers, s, float(iterations), 0.0, 1.0, rank, rank, rank))
            for name, s in first.items()
        }
        return np.array([1e-3 * found[name] for name in names])

    @property
    def _loading(self) -> FloatArray:
        """Time of a load from the host on each server, ms: its fixed part and its part per rank, (2, S)."""
        return self._servers.law.loading[self._servers.kind, :2].T

    def load_s(self, adapter: int) -> FloatArray:
        """Return the time to load an adapter from the host to the GPU of each server, float64 (S,)."""
        fixed, per_rank = self._loading
        found: FloatArray = 1e-3 * (fixed + per_rank * self.workload.ranks[adapter])
        return found

    @property
    def block_bytes(self) -> float:
        """Bytes of KV cache in a block, of the first server."""
        profile = self.cluster.kind(0).profile
        return float(profile.model.kv_bytes_per_token * profile.engine.block_size)

    @property
    def load_bytes_s(self) -> FloatArray:
        """Bandwidth of loads to the GPU of each server, bytes/s, without a load's fixed part, (S,)."""
        model = self.cluster.kind(0).profile.model
        return np.asarray(1e3 * model.lora_bytes_per_rank / np.maximum(self._loading[1], 1e-9))

    @property
    def pool_bytes(self) -> FloatArray:
        """Memory for KV cache and adapters, bytes, float64 (S,)."""
        kinds = {kind.name: kind.profile.model.kv_bytes_per_token for kind in self.cluster.kinds}
        token_bytes = np.array([kinds[name] for name in self.cluster.servers])
        return np.asarray(self._field("kv_blocks") * self._field("block_size") * token_bytes)

    def on_machine(self, held: BoolArray) -> BoolArray:
        """Return which servers share their machine with one of `held`, bool (S,)."""
        counts = [node.servers for node in self.cluster.nodes] or [1] * len(self.cluster)
        machine = np.repeat(np.arange(len(counts)), counts)
        return np.asarray(np.isin(machine, machine[held]))

    kv_blocks = property(lambda self: self._field("kv_blocks"))  # Blocks of the KV cache.
    places = property(lambda self: self._field("max_seqs"))  # Largest number of requests in the batch.

    @property
    def used_share(self) -> FloatArray:
        """Share of the memory for KV cache and adapters in use, float64 (S,)."""
        return self._field("used") / np.maximum(self._field("kv_blocks"), 1)

    @property
    def busy_s(self) -> FloatArray:
        """Time in which each server had something to do, float64 (S,)."""
        busy_s: FloatArray = self._servers.servers["busy_s"].copy()
        return busy_s

    running = property(lambda self: self._field("running"))  # Requests in the batch.

    @property
    def waiting(self) -> IntArray:
        """Requests that wait for a place in the batch."""
        return self._field("waiting") + self._field("inbox_count") + self._servers.on_way

    @property
    def outstanding(self) -> IntArray:
        """All requests of each server, including those at its front end and on their way to it."""
        total: IntArray = self.running + self.waiting + self._field("pending_count")
        return total

    decodes = property(lambda self: self._field("decodes"))  # Requests in the batch that have their first token.

    @property
    def free_kv_tokens(self) -> IntArray:
        """Tokens that the free blocks of the KV cache hold."""
        blocks = self._field("kv_blocks") - self._field("used")
        return blocks * self._field("block_size")

    waiting_prompt_tokens = property(lambda self: self._field("waiting_prompt"))  # Outside the batch.
    active_adapters = property(lambda self: self._field("active"))  # Distinct adapters in the batch.
    slots = property(lambda self: self._field("slots"))  # `max_loras`.
    residents = property(lambda self: self._field("residents"))  # Adapters in slots.

    def candidates(self, adapter: int) -> IntArray:
        """Servers that may serve an adapter, in increasing order."""
        return self._candidates.of(adapter)

    def allowed(self, adapter: int) -> frozenset[int]:
        """Return the servers that may serve an adapter, as a set."""
        group = int(self._candidates.group[adapter])
        found = self._sets.get(group)
        if found is None:
            found = self._sets[group] = frozenset(self._candidates.of(adapter).tolist())
        return found

    def on_gpu(self, adapter: int) -> BoolArray:
        """Return which servers hold an adapter on the GPU, bool (S,)."""
        held = np.zeros(len(self.cluster), dtype=np.bool_)
        _holders(self._servers, adapter, held)
        return held
