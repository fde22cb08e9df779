"""A server whose arithmetic is easy to follow, one that queues, and programs that compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packer.adapter import Adapter
from packer.engine_spec import EngineSpec
from packer.lengths import Lengths
from packer.profile import GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

MakeProfile = Callable[..., Profile]


@pytest.fixture(scope="session")
def make_profile() -> MakeProfile:
    """A profile by its differences from a plain one: 1 KV byte per token, 10 ms a step, nothing else costs.

    Keywords of the engine (`max_num_seqs`, …) and of the memory model (`kv_budget_bytes`, …) go where they
    belong; `latency` and `loading` replace those parts.
    """
    engine = EngineSpec("vllm", "0", max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=64)
    memory = MemorySpec(kv_budget_bytes=1e6, slot_bytes=0.0, slot_bytes_per_rank=0.0, min_kv_tokens=1)
    plain = Profile(
        "tests/plain",
        ModelSpec("plain", 0.0, 1.0, 1.0),
        GpuSpec("plain", 1e9),
        engine,
        memory,
        LatencySpec("linear", {"base_ms": 10.0}),
        LoadingSpec(),
        calibrated=True,
    )

    def make(*, latency: LatencySpec | None = None, loading: LoadingSpec | None = None, **changes: Any) -> Profile:
        of_engine = {k: v for k, v in changes.items() if k in EngineSpec.__dataclass_fields__}
        of_memory = {k: v for k, v in changes.items() if k in MemorySpec.__dataclass_fields__}
        assert len(of_engine) + len(of_memory) == len(changes), changes
        return replace(
            plain,
            engine=replace(engine, **of_engine),
            memory=replace(memory, **of_memory),
            latency=latency or plain.latency,
            loading=loading or plain.loading,
        )

    return make


@pytest.fixture(scope="session")
def busy(make_profile: MakeProfile) -> Run:
    """A server that queues and preempts for a hundred seconds and a half."""
    fleet = Workload(
        [Adapter(f"a{i}", 8, 0.5 + 0.1 * i) for i in range(6)], Lengths.gamma(80, 1.0), Lengths.gamma(40, 1.0)
    )
    profile = make_profile(
        kv_budget_bytes=900.0, latency=LatencySpec("linear", {"base_ms": 20.0, "per_decode_ms": 1.0})
    )
    return simulate(fleet, profile, max_loras=3, duration_s=100.5, timeline_bin_s=10.0)


@pytest.fixture
def compiled_anew(tmp_path: Path) -> Callable[..., list[str]]:
    """Runs a program in a process that keeps kernels in a folder of the test, compiled fast; gives the lines that it
    prints."""

    def run(program: str, folder: Path = tmp_path) -> list[str]:
        environment = dict(os.environ, NUMBA_CACHE_DIR=str(folder), NUMBA_OPT="0")
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    return run


FORKS = """
import json, os, sys, traceback
import numba, numpy
import packer.twin.flags
numba.njit(lambda x: numpy.zeros(1) + x)(1.0)  # what Numba reads before it first compiles is read once
for line in sys.stdin:
    environment, program, output = json.loads(line)
    if (child := os.fork()) == 0:
        code = 1
        try:
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), sys.stdout.fileno())
            os.environ.update(environment)
            exec(program, {"__name__": "__main__"})
            sys.stdout.flush()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported Numba and no kernel; it runs each program in a copy of itself."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.communicate()


@pytest.fixture
def forked_anew(forks: subprocess.Popen[str], tmp_path: Path) -> Callable[..., list[str]]:
    """As `compiled_anew`, in a copy of a process that has imported Numba."""

    def run(program: str, folder: Path = tmp_path) -> list[str]:
        assert forks.stdin is not None
        assert forks.stdout is not None
        output = tmp_path / "printed"
        print(json.dumps([{"NUMBA_CACHE_DIR": str(folder)}, program, str(output)]), file=forks.stdin, flush=True)
        assert forks.stdout.readline() == "0\n", program
        return output.read_text("utf-8").splitlines()

    return run
