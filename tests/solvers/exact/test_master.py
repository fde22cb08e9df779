"""What HiGHS writes to standard output by itself never ends up in what a command prints."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import pytest
import scipy.optimize

from packer.solvers.exact.master import solve_integer


@pytest.mark.skipif(os.name != "posix", reason="needs the C library of the process")
def test_standard_output_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line of the solver is dropped, written at once or from C's buffer, and what follows is not."""
    solve = scipy.optimize.milp

    def talking(*given: Any, **options: Any) -> Any:
        os.write(1, b"HighsMipSolverData::transform\n")
        ctypes.CDLL(None).printf(b"tmpSolver.run();\n")
        return solve(*given, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talking)
    patterns, demand = np.array([[1, 0], [0, 1], [1, 1]]), np.array([2, 3])
    use, proven = solve_integer(patterns, demand, time_limit_s=5.0)
    ctypes.CDLL(None).fflush(None)
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"
    assert use is not None
    assert (int(use.sum()), proven) == (3, True)
