"""OR-Tools and PuLP's HiGHS work in one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CPSAT = """
from ortools.sat.python import cp_model
model = cp_model.CpModel()
model.maximize(model.new_int_var(0, 3, "x"))
solver = cp_model.CpSolver()
assert solver.solve(model) == cp_model.OPTIMAL
"""
HIGHS = """
import pulp
problem = pulp.LpProblem("cover", pulp.LpMinimize)
use = problem.add_variable("use", lowBound=0, cat=pulp.LpInteger)
problem += use
problem += use >= 1.5
problem.solve(pulp.HiGHS(msg=False))
assert use.value() == 2.0
"""


@pytest.mark.parametrize("program", [CPSAT + HIGHS, HIGHS + CPSAT], ids=["CP-SAT first", "HiGHS first"])
def test_both_load_in_one_process(program: str) -> None:
    """Both packages ship a HiGHS of the same file name, of which a process loads one: their versions must agree."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
