"""Which values of `max_loras` all solvers try, and how many adapters a GPU may hold."""

from __future__ import annotations

from packer.solvers.base import MAX_LORAS_CANDIDATES

MAX_ADAPTERS_PER_GPU = MAX_LORAS_CANDIDATES[-1]
"""No solver puts more adapters on a GPU: Algorithm 1 of arXiv 2602.24044 and every measured run end there."""


def max_loras_candidates(n_adapters: int) -> tuple[int, ...]:
    """Values of `max_loras` worth trying for a bin of so many adapters, ascending.

    The paper's candidates up to `n_adapters`, and `n_adapters` itself (every adapter has its slot); more
    slots than adapters only take memory from the KV cache.
    """
    fitting = [p for p in MAX_LORAS_CANDIDATES if p < n_adapters]
    return (*fitting, n_adapters)
