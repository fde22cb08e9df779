"""vLLM plug-ins: two patches and a log of the walk over the adapter slots (written for vLLM 0.32.0).

The folder must be on PYTHONPATH; `packer_findings-1.0.dist-info` beside this file registers the plug-ins and
VLLM_PLUGINS names those that are loaded:

    spare_batch        eviction spares the adapters of the batch (vllm.general_plugins)
    walk_log           one line per step to the file PACKER_WALK_LOG (vllm.general_plugins)
    one_lora_series    vllm:lora_requests_info keeps one time series (vllm.stat_logger_plugins)
    aged_lora_series   as after hours of traffic: PACKER_AGED_SERIES series at the start (vllm.stat_logger_plugins)
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.metrics.loggers import PrometheusStatLogger


class BatchSparingManager(LRUCacheWorkerLoRAManager):  # type: ignore[misc, unused-ignore]
    """Touches every resident adapter of the batch before it loads any, so that an idle one is the oldest."""

    def _apply_adapters(self, lora_requests: set[Any]) -> None:
        manager = self._adapter_manager
        for request in lora_requests:
            manager._registered_adapters.touch(request.lora_int_id)
            manager._active_adapters.touch(request.lora_int_id)
        super()._apply_adapters(lora_requests)


def spare_batch() -> None:
    """Use `BatchSparingManager`."""
    from vllm.v1.worker import lora_model_runner_mixin

    lora_model_runner_mixin.LRUCacheWorkerLoRAManager = BatchSparingManager


def walk_log() -> None:
    """One line per step: time.monotonic(); ids in the order of the walk; ids put into a slot; ids read from disk.

    An adapter that is added outside a step, as at start-up, is a line of its own.
    """
    path = os.environ["PACKER_WALK_LOG"]
    create = LRUCacheWorkerLoRAManager.create_lora_manager

    def create_logged(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = create(self, *args, **kwargs)
        _log_walks(self, path)
        return model

    LRUCacheWorkerLoRAManager.create_lora_manager = create_logged


def _log_walks(worker_manager: Any, path: str) -> None:
    slots = worker_manager._adapter_manager
    activate, load = slots.activate_adapter, worker_manager._load_adapter
    apply, add = worker_manager._apply_adapters, worker_manager.add_adapter
    walked: list[int] = []
    activated: list[int] = []
    loaded: list[int] = []
    in_step = False
    file = open(path, "w", buffering=1)  # noqa: SIM115 - open as long as the process runs

    def logged_activate(lora_id: int, *args: Any, **kwargs: Any) -> Any:
        done = activate(lora_id, *args, **kwargs)
        if done:
            activated.append(lora_id)
        return done

    def logged_load(request: Any) -> Any:
        loaded.append(request.lora_int_id)
        return load(request)

    def write(start_s: float) -> None:
        fields = [" ".join(map(str, ids)) for ids in (walked, activated, loaded)]
        file.write(f"{start_s:.6f};{';'.join(fields)}\n")
        for ids in (walked, activated, loaded):
            ids.clear()

    def logged_add(request: Any) -> Any:
        walked.append(request.lora_int_id)
        start_s = time.monotonic()
        done = add(request)
        if not in_step:
            write(start_s)
        return done

    def logged_apply(requests: set[Any]) -> None:
        nonlocal in_step
        start_s, in_step = time.monotonic(), True
        apply(requests)
        in_step = False
        if walked:
            write(start_s)

    slots.activate_adapter, worker_manager._load_adapter = logged_activate, logged_load
    worker_manager.add_adapter, worker_manager._apply_adapters = logged_add, logged_apply


class OneLoraSeries(PrometheusStatLogger):  # type: ignore[misc, unused-ignore]
    """Removes the last time series of vllm:lora_requests_info before it writes one with other labels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.gauge_lora_info is not None:
            self.gauge_lora_info = _Latest(self.gauge_lora_info)


class _Latest:
    """A gauge of which only the labels used last exist."""

    def __init__(self, gauge: Any) -> None:
        self._gauge, self._last = gauge, None

    def labels(self, **labels: Any) -> Any:
        if labels != self._last:
            self._gauge.clear()
            self._last = labels
        return self._gauge.labels(**labels)


class AgedLoraSeries(PrometheusStatLogger):  # type: ignore[misc, unused-ignore]
    """Starts with as many time series of vllm:lora_requests_info as PACKER_AGED_SERIES says, of 24 adapters each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for i in range(int(os.environ["PACKER_AGED_SERIES"])):
            names = ",".join(f"old-{(i + k) % 512}" for k in range(23)) + f",old-{i}"
            labels = {"max_lora": 0, "waiting_lora_adapters": names, "running_lora_adapters": names}
            self.gauge_lora_info.labels(**labels).set(0.0)
