"""One server: from a workload and a profile to the engine's memory, and from there to results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from packer.arrays import BoolArray, FloatArray, IntArray, Record
from packer.arrival import RequestTrace
from packer.errors import ValidationError
from packer.kv_shape import KvShape
from packer.profile import Profile
from packer.settings import Settings
from packer.twin.arrivals import MAX_REQUESTS, Marks, draw_marks, draw_times, replaying
from packer.twin.drafts import DraftTotals, each_of
from packer.twin.engine import state as rows
from packer.twin.engine.advance import advance
from packer.twin.engine.compile import prepare
from packer.twin.engine.content import Content
from packer.twin.engine.each import Each
from packer.twin.engine.pool import Pool, new_pool, no_pool
from packer.twin.engine.slots import keep_tokenizers, register
from packer.twin.engine_rules import EngineRules, rules_of
from packer.twin.law.law import law_of
from packer.twin.memory.held import share_held
from packer.twin.memory.policy import memory_policy
from packer.twin.tuning.policy import new_tuning, trains
from packer.twin.tuning.state import Tuning
from packer.twin.watch import PARTS, Watch
from packer.workload import Workload

RULES_KEPT = tuple(each.name for each in fields(EngineRules) if each.name in (rows.SERVER.names or ()))
"""Rules of the engine that the kernel reads."""
LIKELY_STEPS_S = 100.0  # Steps per second that change /metrics' sets of adapters; hardly any server has more.
LIKELY_REQ_S = 64.0  # Requests per second that hardly any server completes: marks are drawn for so many, then for more.


@dataclass(frozen=True, eq=False)
class Raw:
    """What the kernel returned.

    `requests`: accepted requests in order of arrival, with `first_s`, `finish_s` as the client sees them (NaN if it did
    not happen) and `finished`. `refused` (m,): number of requests of each adapter that the client could not send, or
    holds back; they have no row. `sent_tokens`: input + output tokens of all requests sent, including these. `server`,
    `timeline` (bins,), `rows` (n,): the kernel's records of the server, of time and of these requests
    (`packer.twin.engine.state`). `tuning`: the record of `packer.twin.tuning.state`, if the server trained. `found`
    (n,): tokens of each request that were in the KV cache at its first admission, -1 before that; None without prefix
    caching. `drafts`: None without speculative decoding. `turned_away` (n,): requests with a row that were refused or
    held back, in a cluster; None: no such request has a row.
    """

    requests: RequestTrace
    refused: IntArray
    sent_tokens: float
    first_s: FloatArray
    finish_s: FloatArray
    finished: BoolArray
    server: Record
    histogram: IntArray
    timeline: Record
    means: FloatArray
    rows: Record
    tuning: Record | None = None
    found: IntArray | None = None
    drafts: DraftTotals | None = None
    turned_away: BoolArray | None = None

    @property
    def engine_s(self) -> FloatArray:
        """When a request reached the engine, and its first token and finish there, before the front end, s, (n, 3)."""
        return np.column_stack([self.rows[name] for name in ("reached_s", "first_s", "finish_s")])

    @classmethod
    def nothing(cls, adapters: int) -> Raw:
        """Return the result of a server that does not start: no request of any adapter was sent."""
        none, count = np.zeros(0), np.zeros(0, dtype=np.int64)
        return cls(
            RequestTrace(none, count, count, count), np.zeros(adapters, dtype=np.int64), 0.0, none, none,
            np.zeros(0, dtype=np.bool_), np.zeros(1, dtype=rows.SERVER)[0], histogram=count, means=none,
            timeline=np.zeros(0, dtype=rows.BIN), rows=np.zeros(0, dtype=rows.REQUEST),
        )  # fmt: skip


@dataclass(frozen=True)
class Server:
    """One server of a workload, as the kernel takes it; see `packer.twin.simulate.simulate`."""

    workload: Workload
    profile: Profile
    settings: Settings
    kv_cache_tokens: int
    max_outstanding: int | None
    mean_state: bool = False
    concurrency: int | None = None
    paced: bool = False
    watch: Watch | None = None

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_cache_tokens // self.profile.engine.block_size

    def adapter_blocks(self) -> IntArray:
        """KV blocks that each adapter takes while it is on the GPU, int64 (m,)."""
        return memory_policy(self.profile).adapter_blocks(self.profile, self.workload)

    @property
    def cold(self) -> bool:
        """Whether all adapters are on disk at the start."""
        warm = self.profile.engine.warm_start
        return self.profile.loading.cold_start if warm is None else not warm

    def prepared(self, server: Record) -> tuple[bool, bool]:
        """Return whether host memory, and whether the front end, has some of the adapters at the start, but not all."""
        warm = bool(self.profile.engine.warm_start)
        return bool(server["track_host"]) and not self.cold, bool(server["tokenizer_places"]) and warm

    def prepare(self, server: Record, adapters: Record) -> None:
        """Put the adapters into host memory and the front end that are there before the first request."""
        on_host, named = self.prepared(server)
        if on_host:
            register(server, adapters, in_slots=not adapters["blocks"].any())
        if named:
            keep_tokenizers(server, adapters)

    @property
    def most_open(self) -> int | None:
        """Open requests beyond which the client or the server refuses more; None: no limit."""
        limits = (self.max_outstanding, self.profile.engine.max_num_queued_reqs)
        return min((limit for limit in limits if limit is not None), default=None)

    def longest_request(self) -> int:
        """Input + output tokens of the longest request that the server takes."""
        room = (self.kv_blocks - int(self.adapter_blocks().max())) * self.profile.engine.block_size
        return min(self.profile.engine.max_model_len, room)

    def run(self, duration_s: float, seed: int, timeline_bin_s: float) -> Raw:
        """Simulate the server. The same seed sends the same requests, whatever the server."""
        drawn = replaying(self.workload, duration_s, seed)
        time_s, adapter = self._times(drawn, duration_s, seed)
        enough = len(time_s)
        if self.concurrency is not None and not self.paced:
            enough = min(enough, self.concurrency + math.ceil(LIKELY_REQ_S * duration_s))
        # Requests that may be refused keep their own marks; a stream would give them to the next ones.
        streamed = self.concurrency is not None or (adapter is None and self.most_open is None)
        while True:
            marks = self._clipped(draw_marks(drawn, adapter, enough, seed))

            def ready(marks: Marks = marks, enough: int = enough) -> rows.ServerState:
                state = self.state(marks, duration_s, timeline_bin_s, seed)
                self.prepare(state.server, state.adapters)
                if streamed:
                    state.server["stream"] = 1
                    state.server["next_s"] = time_s[0] if len(time_s) else np.inf
                    return state._replace(stream_s=self._stream(time_s, enough))
                fill_inbox(state, time_s)
                return state

            tuning = self.tuning(seed)
            state, pool, each = self._advance(ready, marks, duration_s, tuning)
            if not state.server["exhausted"]:
                if self.paced:  # what the client still holds back was not served
                    state.server["sent"] = len(time_s)
                raw = self._raw(state, marks, tuning, pool)
                raw = raw if each is None else replace(raw, drafts=DraftTotals.of(each.whole))
                # The front end may still write outputs when the engine's last step has ended.
                return replace(raw, finished=raw.finished & (raw.finish_s <= duration_s))
            enough = min(len(time_s), 2 * enough)

    def _advance(
        self, ready: Callable[[], rows.ServerState], marks: Marks, duration_s: float, tuning: Tuning | None
    ) -> tuple[rows.ServerState, Pool | None, Each | None]:
        """Return the server after the run, its KV cache if blocks were simulated, and its drafts if it has any.
        `ready`: makes the server before the run. If no two requests share a prefix, prefix caching changes nothing
        until a request is preempted, which then finds its own blocks: such a run is repeated with blocks."""
        rules, law = self.rules(), law_of(self.profile)
        state, n = ready(), len(marks.adapter)
        content = marks.content() if rules.prefix_caching else None
        each = self.each(marks) if self.one_by_one() else None
        if content is None and each is None:
            counted = no_pool(n) if rules.async_scheduling else None
            # with NUMBA_DISABLE_JIT there are no overloads
            if counted is None and state.trees is None and not getattr(advance, "overloads", True):
                prepare()
            cached = rules.prefix_caching
            self._watched(lambda end_s: advance(state, law, end_s, counted, None, tuning), state, duration_s, cached)
            if not cached or not state.server["preemptions"]:
                return state, None, None
            state = ready()
        pool = self.pool(n, content)
        self._watched(lambda end_s: advance(state, law, end_s, pool, each, None), state, duration_s)
        return state, pool if rules.prefix_caching else None, each

    def _watched(
        self, forward: Callable[[float], None], state: rows.ServerState, duration_s: float, repeated: bool = False
    ) -> None:
        """Advance to the end; the watch looks on the way, unless refusals may change what it sees. `repeated`: end at a
        preemption, since the run is repeated then. Raises `packer.twin.watch.BrokenError`: the watch ended the run."""
        known = self.concurrency is None and self.most_open is None  # all that is sent is accepted
        watch = self.watch if known else None
        for part in PARTS if repeated or watch is not None else ():
            forward(part * duration_s)
            if repeated and state.server["preemptions"]:
                return
            if watch is not None:
                watch(state, self.workload, duration_s, part)
        forward(duration_s)

    def pool(self, n: int, content: Content | None) -> Pool:
        """Return the empty KV cache for n requests; without prefix caching blocks are only counted."""
        engine, rules = self.profile.engine, self.rules()
        if not rules.prefix_caching:
            return no_pool(n)
        pool = new_pool(n, self.kv_blocks, engine.block_size, engine.server_seqs, content or Content.none(n))
        pool.all["unhashed_first"] = rules.unhashed_first
        drafts = engine.speculation
        pool.all["lookahead"] = drafts is not None and drafts.reads_ahead and rules.hashes_ahead
        return pool

    def priorities(self, marks: Marks) -> IntArray | int:
        """Return the priorities of requests, int64 (n,); 0 if the engine takes requests as they come."""
        if self.profile.engine.scheduling_policy != "priority":
            return 0
        own = np.array([adapter.priority for adapter in self.workload.adapters], dtype=np.int64)
        return own[marks.adapter] if marks.priority is None else marks.priority

    def one_by_one(self) -> bool:
        """Whether requests are counted one by one: with priorities or drafts (`packer.twin.engine.each`)."""
        return self.profile.engine.speculation is not None or self.profile.engine.scheduling_policy == "priority"

    def each(self, marks: Marks) -> Each:
        """Return what the server then keeps of each request."""
        # Blocks for drafts beyond `max_model_len` are never taken; a smaller KV cache must not ask for them either.
        engine = replace(self.profile.engine, max_model_len=self.longest_request())
        return each_of(self.workload, engine, self.rules(), marks.adapter)

    def rules(self) -> EngineRules:
        """Return the rules of the engine's version; without caching and asynchronous scheduling if it is `unlike_vllm`.
        Raises `ValidationError`: the profile of such a server asks for one of these, for priorities or for
        speculation."""
        engine, other = self.profile.engine, unlike_vllm(self.workload, self.profile)
        if not other:
            return rules_of(engine)
        if self.one_by_one():
            rule = "Expected engine.scheduling_policy fcfs and no engine.speculation in a server"
            raise ValidationError(f"{rule} that {other}.")
        for setting in ("prefix_caching", "async_scheduling"):
            if getattr(engine, setting):
                raise ValidationError(f"Expected engine.{setting} to be off in a server that {other}, got on.")
        return replace(rules_of(engine), prefix_caching=False, async_scheduling=False)

    def _times(self, drawn: Workload, duration_s: float, seed: int) -> tuple[FloatArray, IntArray | None]:
        """As `draw_times`; in a closed loop all requests are due at once, those of a trace in its order."""
        if self.concurrency is None or self.paced:
            return draw_times(drawn, duration_s, seed)
        trace = drawn.arrivals.trace
        return np.broadcast_to(0.0, MAX_REQUESTS if trace is None else len(trace)), None

    def _stream(self, time_s: FloatArray, enough: int) -> FloatArray:
        """Return the stream's times, as a copy if the client holds requests back: the engine then delays them."""
        if self.concurrency is None:
            return np.require(time_s, np.float64, ["C", "W"])
        # With one time more than rows, the engine notices that a request finds no row.
        return np.array(time_s[: enough + 1])

    def _clipped(self, marks: Marks) -> Marks:
        """Cut longer prompts and outputs to the longest request that the server takes; what they share is left."""
        longest = self.longest_request()
        if not len(marks.adapter) or int((marks.input_tokens + marks.output_tokens).max()) <= longest:
            return marks
        prompt = np.minimum(marks.input_tokens, longest - 1)
        output, blocks = np.minimum(marks.output_tokens, longest - prompt), marks.known_blocks()
        return replace(marks, input_tokens=prompt, output_tokens=output, blocks=blocks)

    def tuning(self, seed: int) -> Tuning | None:
        """Return the job that the server trains, at its start; None if it does not train."""
        job = self.workload.fine_tuning
        return new_tuning(job, self.profile, seed) if job is not None and trains(job) else None

    def state(self, marks: Marks, duration_s: float, timeline_bin_s: float, seed: int) -> rows.ServerState:
        """Return the idle server, with rows for the requests of these marks that are still to be sent."""
        profile, engine, m = self.profile, self.profile.engine, self.workload.n_loras
        # vLLM refuses to start with max_cpu_loras < max_loras.
        places = m if engine.max_cpu_loras is None else max(engine.max_cpu_loras, self.settings.max_loras)
        rules, fixed_slots = self.rules(), memory_policy(profile).fixed_slots
        tokenizers = max(self.settings.max_loras, engine.max_num_seqs) if rules.tokenizer_per_adapter else m
        shape = (profile.model.kv_shape if fixed_slots else None) or KvShape()
        settings: dict[str, float] = {
            "ring": rows.ring_of(int(marks.output_tokens.max()) if len(marks.adapter) else 1),
            "run_s": duration_s,
            "bin_s": timeline_bin_s,
            "depth": 2 if rules.async_scheduling else 1,
            "slots": self.settings.max_loras,
            "slot_rank": self.settings.max_lora_rank,
            "kv_blocks": self.kv_blocks,
            "block_size": engine.block_size,
            "window": shape.window,
            "windowed": shape.windowed_share,
            "found_in": max(1, shape.state_block // engine.block_size),
            "share_held": share_held(self.workload, shape) if shape.windowed_share else 1.0,
            "token_budget": engine.server_tokens,
            "max_seqs": engine.server_seqs,
            "max_outstanding": rows.NO_LIMIT if self.most_open is None else self.most_open,
            # The paper's step law divides by this number.
            "served": max(m, 1),
            "host_places": places,
            "tokenizer_places": tokenizers if tokenizers < m else 0,
            "warm": int(bool(engine.warm_start) and tokenizers >= m),
            "spares_batch": int(profile.loading.spares_batch or not fixed_slots),
            # If host memory has room for all adapters, only a cold start reads them from disk.
            "track_host": int(self.cold or places < m),
            **{name: int(getattr(rules, name)) for name in RULES_KEPT},
            "by_priority": int(engine.scheduling_policy == "priority"),
            "concurrency": self.concurrency or 0,
            "released": self.concurrency or 0,
        }
        interval_s = profile.frontend.scrape_interval_s
        state = rows.new_state(
            len(marks.adapter),
            *rows.adapters_of(self.workload.ranks, self.adapter_blocks(), seed),
            settings,
            mean_state=self.mean_state,
            scraped_steps=0 if interval_s is None else math.ceil(LIKELY_STEPS_S * duration_s),
        )
        if interval_s is not None:
            state.server["scrape_s"] = interval_s
        state.requests["owner"] = marks.adapter
        state.requests["prompt"] = marks.input_tokens
        state.requests["output"] = marks.output_tokens
        state.requests["context"] = self.priorities(marks)
        return state

    def _raw(self, state: rows.ServerState, marks: Marks, tuning: Tuning | None, pool: Pool | None) -> Raw:
        n_taken, n_refused = int(state.server["taken"]), int(state.server["sent"] - state.server["taken"])
        streamed = bool(state.server["stream"])
        dense = streamed or not n_refused
        taken = slice(n_taken) if dense else np.flatnonzero(state.requests["status"])
        prompt, output = marks.input_tokens[taken], marks.output_tokens[taken]
        refused, sent_tokens = state.adapters["refused"][1:].copy(), float(prompt.sum() + output.sum())
        if not streamed or self.paced:
            sent_tokens = float(marks.input_tokens.sum() + marks.output_tokens.sum())
        if self.paced:
            refused = np.bincount(marks.adapter[n_taken:], minlength=len(self.workload))
        requests = state.requests[taken]
        return Raw(
            RequestTrace.unchecked(requests["sent_s"].copy(), marks.adapter[taken], prompt, output), refused,
            sent_tokens, requests["first_seen_s"].copy(), requests["finish_seen_s"].copy(),
            requests["status"] == rows.FINISHED, state.server, state.histogram, state.timeline,
            state.means, requests, None if tuning is None else tuning.job, self._found(state, pool, taken),
        )  # fmt: skip

    def _found(self, state: rows.ServerState, pool: Pool | None, at: slice | npt.NDArray[np.intp]) -> IntArray | None:
        if not self.rules().prefix_caching:
            return None
        if pool is not None:
            return pool.found[at].astype(np.int64)
        return np.where(np.isnan(state.requests["first_s"][at]), -1, 0)


def unlike_vllm(workload: Workload, profile: Profile) -> str:
    """What a server does that vLLM does not, so that it runs without caching and async scheduling; "": nothing."""
    job = workload.fine_tuning
    if job is not None and trains(job):
        return "trains beside its requests"
    return "" if memory_policy(profile).fixed_slots else "shares its KV cache with adapters"


def fill_inbox(state: rows.ServerState, time_s: FloatArray) -> None:
    """Offer all requests, sent at these times, at once."""
    n = len(time_s)
    if n:
        state.requests["sent_s"] = time_s
        state.server["waiting_prompt"] = state.requests["prompt"].sum()
        classes = state.adapters["rank_class"][state.requests["owner"] + 1]
        state.classes["unfinished"] = np.bincount(classes, minlength=len(state.classes))
        state.requests["next"] = np.arange(2, n + 2)
        state.requests["next"][-1] = 0
        state.server["inbox"], state.server["inbox_last"], state.server["inbox_count"] = 1, n, n
        state.server["next_s"] = time_s[0]
