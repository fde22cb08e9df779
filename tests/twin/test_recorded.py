"""Two dozen simulations, every output array of which must stay the same to the last bit.

Changes of the simulated mechanisms record anew: `uv run python tests/twin/test_recorded.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import LatencySpec, MemorySpec, Profile
from packer.twin.result import Simulation
from packer.twin.simulate import simulate
from packer.workload import Workload

RECORD = Path(__file__).with_name("recorded.json")
LLAMA, QWEN = "h100-64gb/llama-3.1-8b-instruct", "h100-64gb/qwen-2.5-7b-instruct"
DURATION_S = 400.0
COUNTS = (
    "sent", "refused", "completed", "preemptions", "adapter_loads", "disk_loads", "engine_steps",
    "busy_share", "max_running", "mean_running", "mean_waiting", "sent_tokens",
)  # fmt: skip


def _fleet(n: int, rate: float, arrivals: Arrivals | None = None) -> Workload:
    lengths = Lengths.gamma(223.0, 1.1), Lengths.gamma(196.0, 1.04)
    fleet = [Adapter(f"a{i}", (8, 16, 32)[i % 3], rate * (1, 0.5, 0.25)[i % 3]) for i in range(n)]
    return Workload(fleet, *lengths, -0.2, arrivals)


def _trace(n: int) -> Workload:
    rng = np.random.default_rng(n)
    trace = RequestTrace(
        np.sort(rng.random(n)) * 300.0,
        rng.integers(24, size=n),
        rng.integers(1, 900, size=n),
        rng.integers(1, 500, size=n),
    )
    adapters = [Adapter(f"a{i}", 8, 1.0) for i in range(24)]
    return Workload(adapters, arrivals=Arrivals("trace", trace=trace))


def _tight(kv_tokens: int, policy: str = "reserved", **engine: int) -> Profile:
    """The first profile with little KV cache: requests are preempted."""
    profile = load_profile(LLAMA)
    kv_bytes = float(kv_tokens * profile.model.kv_bytes_per_token)
    memory = MemorySpec(kv_bytes, 0.0, 0.0, 1, policy)  # type: ignore[arg-type]
    return replace(profile, memory=memory, engine=replace(profile.engine, **engine))


def _warm(profile: Profile) -> Profile:
    return replace(profile, loading=replace(profile.loading, cold_start=False))


def _paper() -> Profile:
    law = {"k1": 0.02, "k2": 0.001, "k3": 0.002, "k4": 0.03, "k5": 4.0, "k6": 0.02, "k7": 2.0}
    return replace(load_profile(LLAMA), latency=LatencySpec("paper", law))


def cases() -> dict[str, Callable[[], Simulation]]:
    """Name of a case → what simulates it."""
    run = partial(simulate, duration_s=DURATION_S, max_lora_rank=32, seed=7)
    found: dict[str, Callable[[], Simulation]] = {}
    for name in (LLAMA, QWEN):
        server, label = load_profile(name), name.partition("/")[2][:4]
        found[f"{label} light"] = partial(run, _fleet(24, 0.05), server, max_loras=24)
        found[f"{label} queueing"] = partial(run, _fleet(96, 0.2), server, max_loras=48)
        found[f"{label} few slots"] = partial(run, _fleet(192, 0.1), server, max_loras=16)
        found[f"{label} starved"] = partial(run, _fleet(64, 1.0), server, max_loras=32)
        found[f"{label} means"] = partial(run, _fleet(48, 0.3), server, max_loras=16, mean_state=True)
        found[f"{label} ceiling"] = partial(run, _fleet(64, 2.0), server, max_loras=32, max_outstanding=300)
        found[f"{label} trace"] = partial(run, _trace(4000), server, max_loras=8)
    for kind in ("lognormal", "unpredictable", "piecewise"):
        factors = (1.0, 3.0, 0.5) if kind == "piecewise" else ()
        arrivals = Arrivals(kind, cv=2.0, period_s=60.0, factors=factors)  # type: ignore[arg-type]
        fleet = _fleet(32, 0.8, arrivals)
        found[kind] = partial(run, fleet, load_profile(LLAMA), max_loras=16, max_outstanding=200)
    found["preempted"] = partial(run, _fleet(32, 0.5), _tight(12_000), max_loras=16)
    found["unified"] = partial(run, _fleet(64, 0.5), _tight(20_000, "unified"), max_loras=48)
    found["few sequences"] = partial(
        run, _fleet(32, 0.5), _tight(60_000, max_num_seqs=32, max_num_batched_tokens=256), max_loras=8
    )
    scanning = load_profile(QWEN).with_coefficients(per_waiting_scanned_ms=0.002)
    found["scanned"] = partial(run, _fleet(128, 0.3), scanning, max_loras=8)
    found["warm"] = partial(run, _fleet(64, 0.3), _warm(load_profile(LLAMA)), max_loras=24)
    found["paper"] = partial(run, _fleet(64, 0.3), _paper(), max_loras=24)
    found["paper starved"] = partial(run, _fleet(64, 4.0), _paper(), max_loras=24, max_outstanding=500)
    host = replace(load_profile(QWEN).engine, max_cpu_loras=48)
    found["host cache"] = partial(
        run, _fleet(128, 0.1), replace(load_profile(QWEN), engine=host), max_loras=32
    )
    return found


def digest(sim: Simulation) -> str:
    """Hash of everything that a simulation returns."""
    assert sim.raw is not None
    raw = sim.raw
    arrays = [raw.first_s, raw.finish_s, raw.finished, raw.refused, raw.histogram, raw.timeline, raw.means]
    arrays += [raw.requests.time_s, raw.requests.adapter, raw.requests.input_tokens]
    arrays += [raw.requests.output_tokens, np.array([float(getattr(sim, name)) for name in COUNTS])]
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()[:16]


@pytest.mark.parametrize("name", list(cases()))
def test_simulation_is_the_recorded_one(name: str) -> None:
    """The same seed gives the same bytes, through every change that is not one of the mechanisms."""
    assert digest(cases()[name]()) == json.loads(RECORD.read_text("utf-8"))[name]


if __name__ == "__main__":
    found = {name: digest(run()) for name, run in cases().items()}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
