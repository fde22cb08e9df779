"""The work of a search, counted where most of its time goes, as seconds on a usual server.

A search without a limit of time ends after so much work: it then finds the same plan on a slow machine, or on one that
is busy with other programs.
"""

from __future__ import annotations

EVALUATED_S = 2.7e-5  # A bin that trained trees evaluate, and the steps of the search that lead to it.
FOREIGN_S = 3e-4  # A bin that a predictor of another kind evaluates, whose cost is not known.
SIMULATED_S = 0.03  # A bin that the twin simulates until its result is clear.
CELL_S = 3.8e-9  # A cell of a knapsack's table.
PACKED_S = 8.0  # A unit of the deterministic work of CP-SAT.
ENTRY_S = 4e-7  # An entry of a linear program's matrix.
CHECKED_S = 2e-3  # What HiGHS does between two checks of an integer program's limits,
CHECKED_ENTRY_S = 6e-7  # and more for each entry of its matrix that is not 0.


class Work:
    """Seconds of work done so far. Only a search in one thread at a time may count here."""

    def __init__(self) -> None:
        self.done_s = 0.0

    def add(self, seconds: float) -> None:
        """Count this work."""
        self.done_s += seconds
