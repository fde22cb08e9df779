"""The slow reference of adapters in host memory and in slots: vLLM's two LRU caches.

Follows vllm/lora/worker_manager.py (`LRUCacheWorkerLoRAManager.add_adapter`), vllm/lora/model_manager.py
(`LRUCacheLoRAModelManager`, `AdapterLRUCache._on_remove`) and vllm/utils/cache.py (`LRUCache`); on demand with an
eviction that spares some adapters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection


class NaiveLora:
    """Registered adapters (host memory) and active ones (slots), each least recently used first."""

    def __init__(self, capacity: float, slots: int) -> None:
        self.capacity, self.slots = capacity, slots
        self.registered: OrderedDict[int, None] = OrderedDict()
        self.active: OrderedDict[int, None] = OrderedDict()
        self.loads = self.disk_loads = 0

    def touch(self, adapter: int) -> None:
        """An adapter was used last of all."""
        for cache in (self.registered, self.active):
            if adapter in cache:
                cache.move_to_end(adapter)

    def add_adapter(self, adapter: int, spared: Collection[int] = ()) -> tuple[bool, bool]:
        """Make an adapter active without evicting a spared one; returns whether it came into a slot, and from disk."""
        from_disk = adapter not in self.registered
        if from_disk:
            if len(self.registered) + 1 > self.capacity:
                oldest = next(a for a in self.registered if a not in spared)
                del self.registered[oldest]
                self.active.pop(oldest, None)
            self.registered[adapter] = None
            self.disk_loads += 1
        into_slot = adapter not in self.active
        if into_slot:
            if len(self.active) >= self.slots:
                del self.active[next(a for a in self.active if a not in spared)]
            self.active[adapter] = None
            self.loads += 1
        self.touch(adapter)
        return into_slot, from_disk

    def deactivate(self, adapter: int) -> None:
        """An adapter leaves its slot and stays in host memory."""
        del self.active[adapter]
