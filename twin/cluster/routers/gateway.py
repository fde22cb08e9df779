"""Router "gateway": the endpoint picker of the Gateway API inference extension and of llm-d."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.twin.cluster.prefixes import Index, look_up, new_index, use
from packer.twin.cluster.routers.base import ScoringRouter, VllmServers
from packer.twin.cluster.state import Servers, row_of
from packer.twin.engine.content import Content
from packer.twin.engine.state import ACTIVE, IDLE
from packer.twin.flags import INLINED

MOST_BLOCKS = 256  # Most blocks of a prompt that are looked up: `defaultMaxPrefixBlocks`.


class Picker(NamedTuple):
    """State of the picker.

    weights (4,): lora, queue, kv, prefix. queue (S,), free (S,): waiting requests and free share of the KV cache of
    each server. least, most (1,): shortest and longest queue of the candidates. prompts: the index.
    """

    weights: FloatArray
    queue: FloatArray
    free: FloatArray
    least: FloatArray
    most: FloatArray
    prompts: Index


@njit(**INLINED)
def _note(c: Servers, p: Picker, s: int) -> None:
    """Update the metrics of server `s`."""
    server = c.servers[s]
    p.queue[s] = server.waiting
    p.free[s] = 1.0 - server.used / max(server.kv_blocks, 1)


@njit(**INLINED)
def _survey(c: Servers, p: Picker, server: IntArray, first: int, last: int, r: int) -> None:
    """Find the shortest and the longest queue of the candidates, and how much of the prompt each server has."""
    least = most = p.queue[server[first]]
    for j in range(first + 1, last):
        waiting = p.queue[server[j]]
        least, most = min(least, waiting), max(most, waiting)
    p.least[0], p.most[0] = least, most
    if p.weights[3] > 0.0:
        look_up(p.prompts, c, r, False)


@njit(**INLINED)
def _total(c: Servers, p: Picker, s: int, lora: float) -> float:
    """Return the weighted sum of the scorers, negated: the smallest score is chosen."""
    least, most = p.least[0], p.most[0]
    queue = 1.0 if most == least else (most - p.queue[s]) / (most - least)
    prefix = p.prompts.match[s] / p.prompts.total[0] if p.prompts.total[0] > 0.0 else 0.0
    total: float = p.weights[0] * lora + p.weights[1] * queue + p.weights[2] * p.free[s] + p.weights[3] * prefix
    return -total


@njit(**INLINED)
def _worth(c: Servers, p: Picker, s: int, r: int, lowest: float) -> bool:
    """Whether the score may be below `lowest`, if LoRA affinity scores best."""
    return bool(_total(c, p, s, 1.0) < lowest)


@njit(**INLINED)
def _score(c: Servers, p: Picker, s: int, r: int) -> float:
    """Return the negated weighted sum, with the server's score of LoRA affinity."""
    server = c.servers[s]
    row = row_of(c, s, c.adapter[r])
    if row > 0 and c.adapters[s, row].in_batch > 0:
        lora = 1.0
    elif server.active + server.heap_sizes[IDLE] + server.heap_sizes[ACTIVE] < server.slots:
        lora = 0.8
    elif row > 0 and c.adapters[s, row].head > 0:
        lora = 0.6
    else:
        lora = 0.0
    return float(_total(c, p, s, lora))


@njit(**INLINED)
def _sent(c: Servers, p: Picker, s: int, r: int) -> None:
    """Add the prompt to the index."""
    if p.weights[3] > 0.0:
        use(p.prompts, c, s, r)


@dataclass(frozen=True)
class Gateway(VllmServers, ScoringRouter):
    """The pod with the highest weighted sum of scorers for LoRA affinity, queue, KV cache and prefixes.

    kubernetes-sigs/gateway-api-inference-extension v1.5.0 (df9f8909), pkg/epp, which llm-d uses: the scorers
    loraaffinity, queuedepth, kvcacheutilization and prefix below framework/plugins/scheduling/scorer, the index
    requestcontrol/dataproducer/approximateprefix, and the weights of config/loader/defaults.go: 2, 2 and 3 for queue,
    KV cache and prefixes. LoRA affinity is not in its default configuration; 1 is the weight of a scorer without one.
    LoRA affinity is 1 if requests of the adapter run on the server, 0.8 if there is room for one more adapter, 0.6 if
    its requests only wait there. The first 256 whole blocks of a prompt count, hashed with the adapter's name; for each
    server the index holds as many blocks as its KV cache, those used last. Metrics are at most 50 ms old
    (--refresh-metrics-interval): `stats_age_s` of the system. Which adapters run is up to date here.
    """

    name = "gateway"
    score, note, worth = staticmethod(_score), staticmethod(_note), staticmethod(_worth)
    survey, sent = staticmethod(_survey), staticmethod(_sent)
    reads_prompts = True
    lora: float = 1.0
    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0

    def __post_init__(self) -> None:
        for name in ("lora", "queue", "kv", "prefix"):
            checks.real(name, getattr(self, name), low=0.0)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Picker:
        """Return the weights and the state of the picker before the first request."""
        count, records = len(servers.wake_s), servers.servers
        index = new_index(servers, content, int(records["block_size"][0]), MOST_BLOCKS, records["kv_blocks"].copy())
        return Picker(numbers[:4], np.zeros(count), np.zeros(count), np.zeros(1), np.zeros(1), index)
