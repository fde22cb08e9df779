"""From a workload and a profile to the arrays of the kernel, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from packer.arrival import RequestTrace
from packer.profile import Profile
from packer.settings import Settings
from packer.twin import kernel
from packer.twin import kernel_state as rows
from packer.twin.arrivals import Marks, draw_marks, draw_times
from packer.twin.latency import coefficient_vector
from packer.twin.memory.policy import memory_policy
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_T = TypeVar("_T", bound=np.generic)
NO_LIMIT = 2**60
LIKELY_REQ_S = 64.0
"""Requests per second that hardly any server completes: marks are drawn for so many, more if they run out."""


@dataclass(frozen=True, eq=False)
class Raw:
    """What the kernel returned.

    `requests`: those accepted, in order of arrival, with `first_s`, `finish_s` (NaN where it did not happen)
    and `finished`. `refused` (m,): how many the client could not send, by adapter. `sent_tokens`: input +
    output tokens of all requests sent, refused ones included (at their mean where their lengths were never
    drawn).
    """

    requests: RequestTrace
    refused: IntArray
    sent_tokens: float
    first_s: FloatArray
    finish_s: FloatArray
    finished: npt.NDArray[np.bool_]
    totals: FloatArray
    histogram: IntArray
    timeline: FloatArray
    means: FloatArray


@dataclass(frozen=True)
class Server:
    """One server of a workload, as the kernel takes it."""

    workload: Workload
    profile: Profile
    settings: Settings
    kv_cache_tokens: int
    max_outstanding: int | None
    mean_state: bool = False

    @property
    def kv_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_cache_tokens // self.profile.engine.block_size

    def adapter_blocks(self) -> IntArray:
        """KV blocks that each adapter takes while it is on the GPU, int64 (m,)."""
        return memory_policy(self.profile).adapter_blocks(self.profile, self.workload.ranks)

    def longest_request(self) -> int:
        """Input + output tokens of the longest request that the server takes."""
        room = (self.kv_blocks - int(self.adapter_blocks().max())) * self.profile.engine.block_size
        return min(self.profile.engine.max_model_len, room)

    def run(self, duration_s: float, seed: int, timeline_bin_s: float) -> Raw:
        """Simulate. The same seed sends the same requests, whatever the server."""
        time_s, adapter = draw_times(self.workload, duration_s, seed)
        enough = len(time_s)
        if adapter is None and self.max_outstanding is not None:
            enough = min(enough, self.max_outstanding + math.ceil(LIKELY_REQ_S * duration_s))
        while True:
            marks = self._clipped(draw_marks(self.workload, adapter, enough, seed))
            state = self._simulate(time_s, marks, adapter is None, duration_s, timeline_bin_s)
            if not state.totals[rows.EXHAUSTED]:
                return self._raw(state, marks, adapter is None, seed)
            enough = min(len(time_s), 2 * enough)

    def _clipped(self, marks: Marks) -> Marks:
        """The server takes no longer requests: longer prompts and outputs are cut."""
        longest = self.longest_request()
        if not len(marks.adapter) or int((marks.input_tokens + marks.output_tokens).max()) <= longest:
            return marks
        prompt = np.minimum(marks.input_tokens, longest - 1)
        return Marks(marks.adapter, prompt, np.minimum(marks.output_tokens, longest - prompt))

    def _simulate(
        self, time_s: FloatArray, marks: Marks, marks_wait: bool, duration_s: float, bin_s: float
    ) -> rows.State:
        profile, n = self.profile, len(marks.adapter)
        engine, loading = profile.engine, profile.loading
        scans = (
            profile.latency.form == "linear"
            and profile.latency.coefficients.get("per_waiting_scanned_ms", 0.0) > 0
        )
        state = rows.new_state(
            n,
            len(self.workload),
            int(marks.output_tokens.max()) if n else 1,
            engine.block_size,
            int(np.nextafter(duration_s, 0.0) / bin_s) + 1,
            count_waiting=scans,
            mean_state=self.mean_state,
        )
        kernel.run(
            _frozen(time_s),
            _frozen(marks.adapter),
            _frozen(marks.input_tokens),
            _frozen(marks.output_tokens),
            marks_wait,
            _frozen(self.workload.ranks),
            self.adapter_blocks(),
            coefficient_vector(profile.latency),
            profile.latency.form == "paper",
            float(profile.latency.graph_max_tokens),
            np.array(
                [
                    loading.host_base_ms,
                    loading.host_per_rank_ms,
                    loading.disk_base_ms,
                    loading.disk_per_rank_ms,
                ]
            ),
            duration_s,
            self.settings.max_loras,
            self.settings.max_lora_rank,
            self.kv_blocks,
            engine.block_size,
            engine.max_num_batched_tokens,
            engine.max_num_seqs,
            NO_LIMIT if self.max_outstanding is None else self.max_outstanding,
            NO_LIMIT if engine.max_cpu_loras is None else engine.max_cpu_loras,
            loading.cold_start,
            bin_s,
            *state,
        )
        return state

    def _raw(self, state: rows.State, marks: Marks, marks_wait: bool, seed: int) -> Raw:
        taken = int(state.totals[rows.TAKEN])
        requests = state.requests[:taken]
        prompt, output = requests[:, rows.PROMPT].copy(), requests[:, rows.OUTPUT].copy()
        refused, n_refused = state.refused, int(state.totals[rows.REFUSED])
        if marks_wait:
            workload = self.workload
            refused = np.random.default_rng(seed).multinomial(n_refused, workload.rates / workload.rate)
            sent_tokens = (
                int(prompt.sum() + output.sum()) + n_refused * workload.offered_tok_s / workload.rate
            )
        else:
            sent_tokens = float(marks.input_tokens.sum() + marks.output_tokens.sum())
        times = state.times[:taken]
        return Raw(
            RequestTrace(times[:, rows.SENT_AT].copy(), requests[:, rows.OWNER].copy(), prompt, output),
            refused,
            sent_tokens,
            times[:, rows.FIRST].copy(),
            times[:, rows.FINISH].copy(),
            state.finished[:taken] > 0,
            state.totals,
            state.histogram,
            state.timeline,
            state.means,
        )


def _frozen(column: npt.NDArray[_T]) -> npt.NDArray[_T]:
    """A read-only view. Numba would compile the kernel anew for writable columns, or for strided ones."""
    view = np.ascontiguousarray(column).view()
    view.setflags(write=False)
    return view
