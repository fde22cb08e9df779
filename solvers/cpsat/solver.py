"""`cpsat`: refine a plan by repacking a few bins at a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace

from packer.bin import Bin
from packer.solvers.base import Problem, Solution
from packer.solvers.bounds import bound_of, limited
from packer.solvers.cpsat.lns import Search, Statistics
from packer.solvers.start import start
from packer.solvers.support import counts_gpus, plain

_PARALLEL_FROM = 10_000


class CpSat:
    """Large-neighbourhood search, from greedy's plan or, on a fixed number of GPUs, from a spread one."""

    name = "cpsat"

    def supports(self, problem: Problem) -> str | None:
        """One GPU type, no replicas, no replayed traces; fewest GPUs or a fixed number of them."""
        return plain(problem) if problem.objective.fixed_gpus else counts_gpus(problem)

    def solve(self, problem: Problem) -> Solution:
        """The start's plan or a better one, with the quick bound where GPUs are counted."""
        if problem.objective.fixed_gpus:
            first = start(problem, "spread-refined")
            if first.unplaced or first.reasons:
                return first
            bins, statistics = refine(problem, first.bins)
            return replace(first, bins=bins, details={**first.details, **asdict(statistics)})
        free = replace(problem, max_gpus=None)
        first = start(free)
        bound, details = bound_of(free, first)
        if first.unplaced:
            return limited(problem, first, bound, details)
        bins, statistics = refine(free, first.bins, enough=bound.value)
        return limited(problem, replace(first, bins=bins), bound, {**details, **asdict(statistics)})


def refine(problem: Problem, bins: Sequence[Bin], *, enough: int = 1) -> tuple[tuple[Bin, ...], Statistics]:
    """A plan no worse than `bins`; stops at `enough` GPUs, the time limit, or when nothing helps.

    With more than 10,000 adapters, disjoint neighbourhoods are solved in parallel processes.
    """
    fixed = problem.objective.fixed_gpus
    workers = min(os.cpu_count() or 1, len(bins) // 5)
    if len(problem.workload) <= _PARALLEL_FROM or workers < 2:
        search = Search(problem, bins)
        return search.run(lambda gpus: not fixed and gpus <= enough), search.statistics
    # Spawned, not forked: the predictor's threads don't survive a fork.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        search = Search(problem, bins, pool, workers)
        return search.run(lambda gpus: not fixed and gpus <= enough), search.statistics
