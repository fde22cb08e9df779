"""The parts of the engine are compiled, ahead of it and elsewhere, for the types that `advance` passes them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

PROGRAM = """
import sys
import packer
from packer.twin.compile_ahead import COMPILER
from packer.twin.engine.advance import advance
from packer.twin.engine.by_priority import put_by_key
from packer.twin.engine.compile import ELSEWHERE, HERE, signature
from packer.twin.engine.reversal import put_in, reverse_skipped, take_out
from packer.twin.kernel_cache import is_kept
fleet = packer.Workload([packer.Adapter("a", 8, 1.0)])
sim = packer.simulate(fleet, packer.load_profile("h100-64gb/llama-3.1-8b-instruct"), max_loras=1, duration_s=5.0)
for part in HERE + ELSEWHERE:
    print(part.py_func.__name__, part.signatures == [signature(part)], part.stats.cache_hits[signature(part)])
print("advance", len(advance.signatures), sim.completed > 0)
print("not needed", [kernel for kernel in (put_by_key, put_in, reverse_skipped, take_out) if is_kept(kernel)])
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="nothing is compiled elsewhere on a single core")
def test_two_processes_share_the_parts(compiled_anew: Callable[[str], list[str]]) -> None:
    """Each part is compiled once, for one signature, in its process; what only other servers need is not."""
    assert compiled_anew(PROGRAM) == [
        "arrive True 0",
        "admit True 0",
        "schedule_running True 0",
        "turn True 1",
        "emit True 1",
        "planned_ms True 1",
        "charge True 1",
        "advance 1 True",
        "not needed []",
    ]


BEGUN = """
import packer
from packer.planning.explore import Frontier
from packer.twin.engine.advance import advance
from packer.twin.engine.compile import begin
fleet, profile = packer.Workload([packer.Adapter("a", 8, 1.0)]), packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
begin()
print("begun", len(Frontier(fleet, profile)._plans))
packer.simulate(fleet, profile, max_loras=1, duration_s=5.0)
print("compiled", len(advance.signatures), sum(advance.stats.cache_misses.values()))
print("begun", len(Frontier(fleet, profile)._plans))
"""


def test_trees_propose_once_the_engine_is_compiled(compiled_anew: Callable[[str], list[str]]) -> None:
    """Trees that are still interpreted do not run beside the compiler; an engine that is kept is not compiled again."""
    assert compiled_anew(BEGUN) == ["begun 0", "compiled 1 1", "begun 1"]
    exec(BEGUN, {})  # keeps the engine
    run = subprocess.run([sys.executable, "-c", BEGUN], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["begun 1", "compiled 1 0", "begun 1"]


PLAN = """
import packer
profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
fleet = packer.Workload([packer.Adapter("a", 8, 0.5), packer.Adapter("b", 16, 0.5)])
sim = packer.simulate(fleet, profile, max_loras=2, duration_s=5.0)
plan = packer.solve(fleet, profile, predictor="tree", verify=False)
print(sim.completed, sim.total_token_throughput, sim.engine_steps, plan.bins[0].settings, plan.evaluations[0])
"""


def test_without_compiling_the_kernels_run_as_python(capsys: pytest.CaptureFixture[str]) -> None:
    """NUMBA_DISABLE_JIT changes nothing but the time that a simulation and a plan take."""
    python = subprocess.run(
        [sys.executable, "-c", PLAN],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    exec(PLAN, {})
    assert python.stdout == capsys.readouterr().out != ""
