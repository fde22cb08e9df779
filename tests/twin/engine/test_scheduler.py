"""The engine takes the decisions of vLLM's own scheduler, as recorded on random cases of several versions."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.blocks import Blocks
from packer.profile import FrontEndSpec, LatencySpec, LoadingSpec, MemorySpec, Profile
from packer.twin.run import Run
from packer.twin.simulate import simulate
from packer.workload import Workload

FILE = Path(__file__).parents[2] / "data" / "scheduler" / "vllm.json.gz"
CASES: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
"""`Scheduler` and KV cache manager of vLLM without a model, with a simulated clock: first token and finish of each
request, tokens found in the KV cache at its first admission, and preemptions."""
RUN_S = 1e6


def _profile(case: dict[str, Any], base: Profile) -> Profile:
    engine, law = case["engine"], case["law"]
    settings = {
        key: engine[key] for key in ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size")
    }
    coefficients = {
        "base_ms": law["base"],
        "per_decode_ms": law["token"],
        "per_prefill_token_ms": law["token"],
    }
    return replace(
        base,
        engine=replace(
            base.engine,
            version=case["version"],
            prefix_caching=engine["prefix_caching"],
            async_scheduling=bool(engine.get("async_scheduling")),
            **settings,
        ),
        model=replace(base.model, kv_bytes_per_token=1024.0),
        memory=MemorySpec(engine["blocks"] * engine["block_size"] * 1024.0, 0.0, 0.0, 1),
        latency=LatencySpec("linear", {name: value * 1e3 for name, value in coefficients.items()}),
        loading=LoadingSpec(),
        frontend=FrontEndSpec(),
    )


def _run(case: dict[str, Any], base: Profile) -> Run:
    adapter = np.unique(case["adapter"], return_inverse=True)[1].ravel().astype(np.int64)
    columns = (np.array(case[side], dtype=np.int64) for side in ("prompt", "output"))
    blocks = None
    if case["blocks"]:
        starts = np.concatenate([[0], np.cumsum([len(row) for row in case["blocks"]])])
        ids = np.array([i for row in case["blocks"] for i in row], dtype=np.int64)
        blocks = Blocks(starts.astype(np.int64), ids, case["engine"]["block_size"])
    trace = RequestTrace(np.array(case["time"]), adapter, *columns, blocks=blocks, end_s=RUN_S)
    fleet = Workload(
        [Adapter(f"a{i}", 8, 1.0) for i in range(int(adapter.max()) + 1)],
        arrivals=Arrivals("trace", trace=trace),
    )
    slots = case["engine"]["max_loras"]
    return simulate(
        fleet, _profile(case, base), max_loras=slots, max_lora_rank=8, duration_s=RUN_S, timeline_bin_s=1e4
    )


@pytest.mark.parametrize("number", range(len(CASES)))
def test_decisions_are_those_of_vllm(number: int, make_profile: Callable[..., Profile]) -> None:
    """Every first token and finish agrees to a microsecond, every hit and the number of preemptions exactly."""
    case = CASES[number]
    sim = _run(case, make_profile())
    np.testing.assert_allclose(sim.raw.first_s, case["first"], rtol=0.0, atol=1e-6)
    np.testing.assert_allclose(sim.raw.finish_s, case["finish"], rtol=0.0, atol=1e-6)
    if case["version"] == "0.32.0":  # older ones do not say whom they preempted
        assert sim.preemptions == case["preemptions"]
    if case["engine"]["prefix_caching"]:
        assert sim.raw.found is not None
        assert sim.raw.found.tolist() == case["cached"]
        assert sim.cached_tokens == sum(case["cached"])
        assert sim.prefix_hit_rate == pytest.approx(sum(case["cached"]) / sum(case["prompt"]))


def test_the_cases_cover_what_differs() -> None:
    """Each pair of settings has cases, some of which preempt or find prefixes, and so have older versions."""
    modes = {
        (case["engine"]["prefix_caching"], bool(case["engine"].get("async_scheduling"))) for case in CASES
    }
    assert len(modes) == 4
    assert len({case["version"] for case in CASES}) >= 4
    assert sum(case["preemptions"] > 0 for case in CASES) > 2
    assert sum(sum(case["cached"]) > 0 for case in CASES) > 5
