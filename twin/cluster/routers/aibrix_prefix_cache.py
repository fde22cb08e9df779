"""Router "aibrix-prefix-cache": AIBrix' routing by prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.twin.arrivals import BLOCK_TOKENS
from packer.twin.cluster.prefixes import Index, look_up, new_index, use
from packer.twin.cluster.routers.aibrix import drawn
from packer.twin.cluster.routers.base import ScoringRouter, VllmServers
from packer.twin.cluster.state import Servers, outstanding
from packer.twin.engine.content import Content
from packer.twin.flags import INLINED

NO_MATCH = 1000.0  # Score of servers without a match, larger than any score with a match.
KEPT_S = 1200.0  # Time after which an unused block is forgotten, s.


class Known(NamedTuple):
    """State of the gateway. settings (2,): imbalance, deviations. requests (S,): of each server. least, limit (1,):
    fewest requests of a server, and most requests that a server with a match may have. prompts: the index."""

    settings: FloatArray
    requests: FloatArray
    least: FloatArray
    limit: FloatArray
    prompts: Index


@njit(**INLINED)
def _note(c: Servers, p: Known, s: int) -> None:
    """Update the number of requests of server `s`, which the gateway counts."""
    p.requests[s] = outstanding(c, s)


@njit(**INLINED)
def _survey(c: Servers, p: Known, server: IntArray, first: int, last: int, r: int) -> None:
    """Set the most requests that a server chosen by prefix may have, and look up the prompt."""
    least, most, total = math.inf, 0.0, 0.0
    for j in range(first, last):
        requests = p.requests[server[j]]
        least, most, total = min(least, requests), max(most, requests), total + requests
    mean, squares = total / (last - first), 0.0
    for j in range(first, last):
        squares += (p.requests[server[j]] - mean) ** 2
    deviation = math.sqrt(squares / (last - first - 1)) if last - first > 1 else 0.0
    p.least[0] = least
    p.limit[0] = least if most - least > p.settings[0] else mean + p.settings[1] * deviation
    look_up(p.prompts, c, r, True)


@njit(**INLINED)
def _score(c: Servers, p: Known, s: int, r: int) -> float:
    """Longest match first, then fewest requests, then random; without a match a random one of the most idle servers."""
    requests, match, noise = p.requests[s], p.prompts.match[s], drawn(r, s) / 2.0**32
    if match > 0.0 and requests <= p.limit[0]:
        percent = match * p.prompts.size * 100.0 // c.prompt[r]
        return float(-percent + (requests + noise) * 1e-9)
    return float(NO_MATCH + noise) if requests == p.least[0] else math.inf


@njit(**INLINED)
def _sent(c: Servers, p: Known, s: int, r: int) -> None:
    """Add the prompt to the index."""
    use(p.prompts, c, s, r)


@dataclass(frozen=True)
class AibrixPrefixCache(VllmServers, ScoringRouter):
    """The server that has most of the prompt, unless it has too many requests; else one with the fewest requests.

    vllm-project/aibrix at e3e10f9, pkg/plugins/gateway/algorithms/prefix_cache.go and
    pkg/utils/prefixcacheindexer/hash.go, with their defaults. Too many requests are more than the mean plus
    `deviations` standard deviations; if the largest number exceeds the smallest by more than `imbalance`, only servers
    with the fewest are considered. The index holds `blocks` blocks of four characters for all servers together, and
    forgets blocks that were not used for 20 minutes. Here a token is four characters, and the index holds blocks of 16
    tokens, the unit of shared prefixes. Matches are whole percents of the prompt's tokens.
    """

    name = "aibrix-prefix-cache"
    score, note = staticmethod(_score), staticmethod(_note)
    survey, sent = staticmethod(_survey), staticmethod(_sent)
    reads_prompts = True
    imbalance: float = 8.0
    deviations: float = 1.0
    blocks: int = 200_000

    def __post_init__(self) -> None:
        checks.real("imbalance", self.imbalance, low=0.0)
        checks.real("deviations", self.deviations, low=0.0)
        checks.integer("blocks", self.blocks, low=BLOCK_TOKENS)

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Known:
        """Return the settings and the state of the gateway before the first request."""
        limit = np.array([self.blocks // BLOCK_TOKENS])
        index = new_index(servers, content, BLOCK_TOKENS, 2**40, limit, KEPT_S)
        return Known(numbers[:2], np.zeros(len(servers.wake_s)), np.zeros(1), np.zeros(1), index)
