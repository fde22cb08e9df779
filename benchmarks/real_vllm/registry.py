"""Time of `LRUCacheWorkerLoRAManager.list_adapters`, which vLLM calls for each adapter of a batch in every step.

Run with the interpreter of vLLM's environment: `vllm-cpu/.venv-vllm/bin/python benchmarks/real_vllm/registry.py`.
Prints, by adapters in host memory, the microseconds of a call and of the membership test that it serves.
"""

from __future__ import annotations

import timeit
from types import SimpleNamespace

from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

SIZES = (48, 96, 192, 384)
CALLS, REPEATS = 200, 7


def main() -> None:
    """Measure every size; the smallest of the repeats counts."""
    for size in SIZES:
        registered = AdapterLRUCache(size, lambda _number: None)
        for number in range(size):
            registered[number] = object()
        manager = SimpleNamespace(_registered_adapters=registered)
        manager.list_adapters = lambda manager=manager: LRUCacheLoRAModelManager.list_adapters(manager)
        worker = SimpleNamespace(_adapter_manager=manager)
        calls = {
            "list_adapters": lambda worker=worker: 5 in LRUCacheWorkerLoRAManager.list_adapters(worker),
            "membership": lambda registered=registered: 5 in registered,
        }
        times = {name: min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) for name, call in calls.items()}
        print(size, *(f"{name} {seconds / CALLS * 1e6:.2f} us" for name, seconds in times.items()))


if __name__ == "__main__":
    main()
