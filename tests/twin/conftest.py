"""A server whose arithmetic is easy to follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile

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

    def make(
        *, latency: LatencySpec | None = None, loading: LoadingSpec | None = None, **changes: Any
    ) -> Profile:
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
