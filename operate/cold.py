"""What a prefix cache holds, and what is lost of it where adapters move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.arrays import FloatArray
from packer.cluster import ServerKind
from packer.operate.capacity import rank_of
from packer.solvers.nearest import Nearest
from packer.twin.engine_rules import rules_of
from packer.twin.memory.policy import kv_cache_tokens
from packer.workload import Workload


def caches_prefixes(kind: ServerKind) -> bool:
    """Whether servers of this kind have a prefix cache."""
    return rules_of(kind.profile.engine).prefix_caching


def cache_lost(fleet: Workload, load: FloatArray, near: Nearest, kinds: Sequence[ServerKind]) -> float:
    """Tokens that servers compute again after a change to a placement, because the caches that hold them are elsewhere.

    A server computes at most as many as its KV cache holds.
    `load`: of each adapter, tok/s, float64 (m,). `kinds`: of each server.
    """
    if not fleet.shares_prefixes:
        return 0.0
    cached, lost = cached_tokens(fleet, load), 0.0
    for s in near.serving:
        kind, was, now = kinds[s], near.before[s], near.held[s]
        if was != now and caches_prefixes(kind):
            most = kv_cache_tokens(kind.profile, kind.profile.settings(kind.max_loras, rank_of(kind, fleet)))
            came = sum(float(cached[a]) * max(0.0, share - was.get(a, 0.0)) for a, share in now.items())
            lost += min(came, max(0.0, most))
    return lost


def cached_tokens(fleet: Workload, load: FloatArray) -> FloatArray:
    """Tokens of each adapter that a prefix cache holds for later requests, float64 (m,): a server that has none of them
    computes them again.

    The shared beginning, and what was said in the sessions that are between two turns: later turns per second × the
    time between turns (Little's law), each with first + turns × (output + added) - added tokens, as a later turn of a
    geometric number has in the mean.

    `load`: of each adapter, tok/s, float64 (m,).
    """
    found: FloatArray = fleet.shared_prefix_tokens.astype(np.float64)
    for a, own in enumerate(fleet.sessions_by_adapter):
        if own is not None:
            adapter, output = fleet.adapters[a], float(fleet.mean_output_tokens[a])
            first = (adapter.input_tokens or fleet.input_tokens).expected
            added = own.added_tokens(first, adapter.shared_prefix_tokens)
            waiting = load[a] / fleet.mean_tokens[a] * (1.0 - 1.0 / own.turns) * own.gap_s(output)
            found[a] += waiting * (first + own.turns * (output + added) - added)
    return found
