"""A vLLM worker that records every engine step: `--worker-cls packer_step_worker.StepWorker`.

Its folder must be on PYTHONPATH. PACKER_STEP_LOG in the environment names the log, with one CSV row per step:

    start_s         time.monotonic() when the step began
    model_ms        time in execute_model and sample_tokens (on a GPU the kernels may still run)
    follows         1 if a request of the previous step is in this one: the gap between the two starts is then
                    the whole time of the previous step, scheduling and output included
    decodes, prefills, prefill_tokens   requests that decode, requests that prefill, tokens of the prefills
    kv_tokens                           context of the decodes
    adapters, sum_ranks                 distinct adapters in the batch, sum of their ranks
    host_loads, host_ranks, host_ms     adapters loaded into a slot, sum of their ranks, time
    disk_loads, disk_ranks, disk_ms     adapters loaded from disk before that, sum of their ranks, extra time

Version 0.32's types are used: vllm/v1/core/sched/output.py (`SchedulerOutput`), vllm/lora/worker_manager.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker

COLUMNS = (
    "start_s,model_ms,follows,decodes,prefills,prefill_tokens,kv_tokens,adapters,sum_ranks,"
    "host_loads,host_ranks,host_ms,disk_loads,disk_ranks,disk_ms"
)
FLUSH_S = 0.5


class StepWorker(BaseWorker):  # type: ignore[misc, valid-type, unused-ignore]
    """The usual worker of the platform, with a log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._requests: dict[str, tuple[int, int, int]] = {}  # prompt tokens, adapter id (0: none), its rank
        self._last: set[str] = set()
        self._row: list[float] | None = None
        self._loads = [0.0] * 6
        self._flushed = 0.0
        self._file = None
        if self.rank == 0 and "PACKER_STEP_LOG" in os.environ:
            path = Path(os.environ["PACKER_STEP_LOG"])
            self._file = path.open("w")
            self._file.write(COLUMNS + "\n")
            self._file.flush()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM does, then time all loading of adapters."""
        super().load_model(*args, **kwargs)
        manager = getattr(self.model_runner, "lora_manager", None)
        if manager is None or self._file is None:
            return
        activate, load = manager._adapter_manager.activate_adapter, manager._load_adapter
        loads = self._loads

        def timed_activate(lora_id: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            done = activate(lora_id, *args, **kwargs)
            if done:
                loads[0] += 1
                loads[1] += manager._adapter_manager.list_adapters()[lora_id].rank
                loads[2] += (time.monotonic() - start) * 1e3
            return done

        def timed_load(request: Any) -> Any:
            start = time.monotonic()
            model = load(request)
            loads[3] += 1
            loads[4] += model.rank
            loads[5] += (time.monotonic() - start) * 1e3
            return model

        manager._adapter_manager.activate_adapter = timed_activate
        manager._load_adapter = timed_load

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run vLLM's method and time it; a step without tokens is not recorded."""
        if self._file is None:
            return super().execute_model(scheduler_output)
        start = time.monotonic()
        self._write_row()
        # In place, because the timed functions hold this list.
        self._loads[:] = [0.0] * 6
        result = super().execute_model(scheduler_output)
        spent_ms = (time.monotonic() - start) * 1e3
        if scheduler_output.total_num_scheduled_tokens:
            self._row = self._describe(start, spent_ms, scheduler_output)
        else:
            self._forget(scheduler_output)
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Run vLLM's method and add its time to the same step."""
        start = time.monotonic()
        result = super().sample_tokens(*args, **kwargs)
        if self._row is not None:
            self._row[1] += (time.monotonic() - start) * 1e3
        return result

    def _describe(self, start: float, spent_ms: float, output: Any) -> list[float]:
        self._forget(output)
        computed = {}
        for request in output.scheduled_new_reqs:
            lora = request.lora_request
            known = (lora.lora_int_id, self._rank_of(lora)) if lora is not None else (0, 0)
            self._requests[request.req_id] = (len(request.prompt_token_ids or ()), *known)
            computed[request.req_id] = request.num_computed_tokens
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        decodes = prefills = prefill_tokens = kv_tokens = 0
        ranks: dict[int, int] = {}
        for name, n in output.num_scheduled_tokens.items():
            prompt, adapter, rank = self._requests.get(name, (0, 0, 0))
            before = computed.get(name, 0)
            if n == 1 and before >= prompt:
                decodes += 1
                kv_tokens += before
            else:
                prefills += 1
                prefill_tokens += n
            if adapter:
                ranks[adapter] = rank
        now = set(output.num_scheduled_tokens)
        follows = int(not self._last.isdisjoint(cached.req_ids))
        self._last = now
        row = [start, spent_ms, follows, decodes, prefills, prefill_tokens, kv_tokens, len(ranks)]
        return [*row, sum(ranks.values()), *self._loads]

    def _forget(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._requests.pop(name, None)

    def _rank_of(self, lora: Any) -> int:
        """Rank of a loaded adapter; `get_adapter` would make it the most recently used one."""
        model = self.model_runner.lora_manager._adapter_manager.list_adapters().get(lora.lora_int_id)
        return int(getattr(model, "rank", 0) or 0)

    def _write_row(self) -> None:
        if self._row is None or self._file is None:
            return
        self._file.write(",".join(f"{value:.6f}".rstrip("0").rstrip(".") for value in self._row) + "\n")
        self._row = None
        if time.monotonic() - self._flushed > FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()
