"""Greedy first-fit decreasing, to the letter of arXiv 2602.24044, Algorithms 1 and 2.

Interpretation of points that the paper leaves open:

- A GPU that failed its test is closed and not used again; adapters that are rolled back keep their place in the queue.
- Before the first test no `max_loras` is set: only the first candidate is tried. After the last candidate, the
  next candidate is the last one again.
- A memory error counts as a throughput below any other.
- A set that fails on an empty GPU would fail on every GPU: the search ends.
- After the last testing point nothing would be tested before the end of the queue: the GPU is closed.

The paper's weaknesses are kept. If the queue ends between two testing points, the rest is tested once; if that test
fails, the fleet is infeasible, although a new GPU might hold the rest. The last GPU may also have more slots than
adapters. `packer.solvers.greedy` improves on both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packer.arrays import IntArray
from packer.bin import Bin
from packer.solvers.base import MAX_LORAS_CANDIDATES, Problem, Solution
from packer.solvers.order import paper_order
from packer.solvers.reasons import listed, out_of_gpus
from packer.solvers.slots import SlotSearch
from packer.solvers.support import chooses_gpus, one_type

TESTING_POINTS = MAX_LORAS_CANDIDATES
_LIKELY = [(n, p) for n in TESTING_POINTS[:7] for p in MAX_LORAS_CANDIDATES[:3] if p <= n]
"""Adapters and `max_loras` of tests that most GPUs reach: evaluated in one call if calls cost more than bins."""


class GreedyPaper:
    """Fills GPUs one by one, testing at fixed numbers of adapters with two values of `max_loras`."""

    name = "greedy-paper"

    def supports(self, problem: Problem) -> str | None:
        """Objectives that choose the number of GPUs, one GPU type, no replicas."""
        return chooses_gpus(problem) or one_type(problem)

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled; a test that ends the search leaves the rest unplaced."""
        queue = paper_order(problem.workload)
        slots = SlotSearch(problem)
        bins: list[Bin] = []
        start, failed, most = 0, "", problem.max_gpus or len(queue)
        while start < len(queue) and len(bins) < most and not failed and not problem.out_of_time():
            problem.progress("packing", start, len(queue))
            filled, failed = fill(slots, queue[start:])
            if filled is not None:
                bins.append(filled)
                start += len(filled.adapters)
        left = tuple(queue[start:].tolist())
        return Solution(tuple(bins), left, _reasons(problem, bins, left, failed))


def fill(slots: SlotSearch, queue: IntArray) -> tuple[Bin | None, str]:
    """The bin that Algorithm 1 leaves on one GPU, a prefix of the queue, and the test that ended the search, in words.
    The bin is None if nothing was committed; the text is empty if the search continues with the next GPU."""
    quick = slots.problem.evaluator.fast and not slots.problem.evaluator.simulates
    likely = [each for each in _LIKELY if quick and each[0] <= len(queue)]
    known = _evaluated(slots, queue, likely) if likely else {}

    def test(n: int, current: int) -> int:
        """Algorithm 2: the current or next `max_loras`, whichever is predicted to serve more; 0 if it fails."""
        following = next((p for p in MAX_LORAS_CANDIDATES if p > current), current)
        options = [(n, p) for p in (current, following) if p]
        if not known.keys() >= set(options):
            known.update(_evaluated(slots, queue, options))
        best = max(options, key=lambda each: known[each][0])
        return best[1] if known[best][1] else 0

    held, most, failed = 0, 0, ""
    points = [point for point in TESTING_POINTS if point < len(queue)]
    for point in [*points, len(queue)][: len(TESTING_POINTS)]:
        chosen = test(point, most)
        if not chosen and point not in TESTING_POINTS:
            failed = f"the last test, of {point} adapters on one GPU,"
        elif not chosen and not held:
            failed = f"the test of {point} adapters on an empty GPU"
        if not chosen:
            break
        held, most = point, chosen
    return slots.make(queue[:held].tolist(), most) if held else None, failed


def _evaluated(
    slots: SlotSearch, queue: IntArray, tests: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[float, bool]]:
    """For each test (adapters, `max_loras`) the throughput, -1 for a memory error, and whether the bin holds."""
    found, holds = slots.evaluate(slots.first(queue, [n for n, _ in tests], [p for _, p in tests]))
    served = np.where(found.memory_error, -1.0, found.total_token_throughput)
    return dict(zip(tests, zip(served.tolist(), holds.tolist(), strict=True), strict=True))


def _reasons(problem: Problem, bins: Sequence[Bin], left: Sequence[int], failed: str) -> tuple[str, ...]:
    if not left:
        return ()
    if failed:
        helps = "What would help: --solver greedy, which goes on from there with smaller sets"
        return (f"{failed} failed: {listed(problem.workload, left)} without a place. {helps}",)
    if problem.max_gpus is not None and len(bins) >= problem.max_gpus:
        return out_of_gpus(problem, left)
    return (f"stopped before {listed(problem.workload, left)} had a place",)
