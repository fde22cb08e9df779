"""Indexes of prompts by server, written out with dictionaries from the sources of two gateways."""

from __future__ import annotations

from collections import OrderedDict


class PerServer:
    """approximateprefix/indexer.go: an LRU cache of hashes for each server, and the servers that have each hash."""

    def __init__(self, servers: int, limit: int) -> None:
        self.caches: list[OrderedDict[object, None]] = [OrderedDict() for _ in range(servers)]
        self.limit = limit

    def match(self, hashes: list[object]) -> list[int]:
        """matchLongestPrefix: hashes of each server, up to one that none has."""
        found = [0] * len(self.caches)
        for each in hashes:
            having = [s for s, cache in enumerate(self.caches) if each in cache]
            if not having:
                break
            for s in having:
                found[s] += 1
        return found

    def add(self, hashes: list[object], s: int) -> None:
        """Add: one after the other becomes the newest, and the oldest leaves."""
        for each in hashes:
            self.caches[s][each] = None
            self.caches[s].move_to_end(each)
            if len(self.caches[s]) > self.limit:
                self.caches[s].popitem(last=False)


class Shared:
    """AIBrix' prefixcacheindexer/hash.go: one LRU store of hashes, each with the servers that it was sent to."""

    def __init__(self, servers: int, limit: int) -> None:
        self.store: OrderedDict[object, set[int]] = OrderedDict()
        self.servers, self.limit = servers, limit

    def match(self, hashes: list[object]) -> list[int]:
        """seqSearchPrefix: a server that lacks a hash is looked at no more."""
        found, left = [0] * self.servers, set(range(self.servers))
        for i, each in enumerate(hashes):
            left &= self.store.get(each, set())
            for s in left:
                found[s] = i + 1
        return found

    def add(self, hashes: list[object], s: int) -> None:
        """AddPrefix: one after the other becomes the newest."""
        for each in hashes:
            self.store.setdefault(each, set()).add(s)
            self.store.move_to_end(each)
            if len(self.store) > self.limit:
                self.store.popitem(last=False)
