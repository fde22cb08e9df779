"""Every solver of packer keeps the contract that plug-ins are held to."""

from __future__ import annotations

import pytest

from packer import registry
from packer.solvers.base import Solver
from packer.testing.contracts import SolverContract

NAMES = [
    "greedy",
    "greedy-paper",
    "maxbase",
    "maxbase-half",
    "proposed-lat",
    "random",
    "spread",
    "spread-refined",
    "hrw",
    "flow",
    "dlora",
    "replan",
    "cpsat",
]


class TestBuiltIns(SolverContract):
    """The shipped suite, once for each solver of this folder."""

    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`cpsat` gives up early: the rules hold however long it searches."""
        monkeypatch.setattr("packer.solvers.cpsat.search._PATIENCE", 3)

    @pytest.fixture(params=NAMES)
    def solver(self, request: pytest.FixtureRequest) -> Solver:
        """The solver under test."""
        made: Solver = registry.load("solver", request.param)()
        return made
