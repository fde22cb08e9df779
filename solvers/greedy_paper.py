"""Greedy first-fit decreasing, to the letter of arXiv 2602.24044, Algorithms 1 and 2.

How its open points are read:

- A GPU that failed its test is closed and not offered again; what is rolled back keeps its place in line.
- Before the first test no `max_loras` is set: only the first candidate is tried. At the last candidate the
  next one is the same.
- `max_loras` never exceeds the number of adapters, where it would only waste memory.
- A memory error counts as a throughput below any other.
- After the last testing point nothing would be tested any more: such a GPU is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

from packer.bin import Bin
from packer.solvers.base import MAX_LORAS_CANDIDATES, Problem, Solution
from packer.solvers.order import paper_order
from packer.solvers.probe import Probe
from packer.solvers.reasons import listed, out_of_gpus

TESTING_POINTS = MAX_LORAS_CANDIDATES


class GreedyPaper:
    """Fills GPUs one by one, testing at fixed numbers of adapters with two values of `max_loras`."""

    name = "greedy-paper"

    def supports(self, problem: Problem) -> str | None:
        """Objectives that choose the number of GPUs, one GPU type, no replicas."""
        if problem.objective.fixed_gpus:
            return "it chooses how many GPUs to use; for a fixed number take the solver spread"
        return "it knows one GPU type only" if len(problem.profiles) > 1 else None

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        queue = paper_order(problem.workload).tolist()
        probe = Probe(problem)
        bins: list[Bin] = []
        start = 0
        while start < len(queue) and (problem.max_gpus is None or len(bins) < problem.max_gpus):
            if problem.out_of_time():
                break
            problem.progress("packing", start, len(queue))
            filled = fill(probe, queue[start:])
            if filled is None:  # the next GPU would fail the same test
                break
            bins.append(filled)
            start += len(filled.adapters)
        left = tuple(queue[start:])
        return Solution(tuple(bins), left, _reasons(problem, bins, left))


def fill(probe: Probe, queue: Sequence[int]) -> Bin | None:
    """The bin that Algorithm 1 leaves on one GPU, the adapters being a prefix of the queue; None if none."""
    committed: Bin | None = None
    for point in (*(n for n in TESTING_POINTS if n < len(queue)), len(queue)):
        if point > TESTING_POINTS[-1]:
            break
        tested = _test(probe, queue[:point], committed)
        if tested is None:
            break
        committed = tested
    return committed


def _test(probe: Probe, adapters: Sequence[int], committed: Bin | None) -> Bin | None:
    """Algorithm 2: the current and the next `max_loras`, whichever promises the higher throughput."""
    current = committed.max_loras if committed is not None else 0
    following = next((p for p in MAX_LORAS_CANDIDATES if p > current), current)
    options = [current, following] if committed is not None else [following]
    bins = [probe.make(adapters, min(p, len(adapters))) for p in options]
    found, admissible = probe.evaluate(bins)
    throughput = [-1.0 if e.memory_error else e.total_token_throughput for e in found]
    best = throughput.index(max(throughput))
    return bins[best] if admissible[best] else None


def _reasons(problem: Problem, bins: Sequence[Bin], left: Sequence[int]) -> tuple[str, ...]:
    if not left:
        return ()
    if problem.out_of_time():
        return (f"stopped before {listed(problem.workload, left)} had a place",)
    if problem.max_gpus is not None and len(bins) >= problem.max_gpus:
        return out_of_gpus(problem, left)
    return (
        f"the next test failed on an empty GPU: {listed(problem.workload, left)} without a place. "
        "What would help: --solver greedy, which tests smaller sets",
    )
