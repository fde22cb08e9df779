"""Which values of `max_loras` all solvers try, and how many adapters a GPU may hold."""

from __future__ import annotations

from collections.abc import Sequence

from packer.bin import Bin
from packer.solvers.base import MAX_LORAS_CANDIDATES
from packer.twin.arrivals import cut_words
from packer.workload import Workload


def max_loras_candidates(n_adapters: int) -> tuple[int, ...]:
    """Values of `max_loras` to try for a bin of so many adapters, ascending.

    The paper's candidates up to `n_adapters`, and `n_adapters` itself (every adapter has its slot); more
    slots than adapters only take memory from the KV cache.
    """
    fitting = [p for p in MAX_LORAS_CANDIDATES if p < n_adapters]
    return (*fitting, n_adapters)


def beyond_measured(workload: Workload, bins: Sequence[Bin]) -> tuple[str, ...]:
    """A sentence on each kind of server that cuts requests, and on each GPU with more adapters than were measured."""
    many = (
        f"GPU {k} holds {len(item.adapters):,} adapters, beyond the {item.profile.measured_adapters:,} up to which "
        f"the profile was measured (measured_adapters in {item.profile.name})"
        for k, item in enumerate(bins)
        if len(item.adapters) > item.profile.measured_adapters
    )
    return (*cut_words(workload, dict.fromkeys(item.profile for item in bins)), *many)
