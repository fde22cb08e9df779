"""The whole way on real vLLM: one server, about two minutes. Needs a launch file:

packer live setup-cpu vllm-cpu
PACKER_VLLM_LAUNCH=vllm-cpu/launch.toml uv run pytest tests/live/test_real_vllm.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.lengths import Lengths
from packer.live import calibration
from packer.live.calibration import calibrate
from packer.live.environment import probe
from packer.live.launch import read_launch
from packer.live.validate import Validation, ValidationSpec
from packer.settings import Settings
from packer.workload import Workload

VARIABLE = "PACKER_VLLM_LAUNCH"


def reason_to_skip() -> str:
    """Why there is no real vLLM to test; "" if there is."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return f"{VARIABLE} is not set: packer live setup-cpu makes a launch file"
    if not Path(path).exists():
        return f"{VARIABLE}: there is no file {path}"
    found = probe(read_launch(path).python)
    return found if isinstance(found, str) else ""


def test_calibrate_and_validate_on_real_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is calibrated, another load runs on its kind, and both ends come together in a report."""
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    monkeypatch.setattr(calibration, "BURST_BATCHES", (1, 4, 16))
    monkeypatch.setattr(calibration, "MIXED_S", 5.0)
    launch = read_launch(os.environ[VARIABLE])
    profile, outcomes, _ = calibrate(launch, tmp_path / "calibrate", servers=(Settings(4, 8),))
    assert all(o.complete for o in outcomes), [o.failure for o in outcomes]
    assert profile.memory.measured[0][:2] == (4, 8)
    assert profile.latency.coefficients
    fleet = Workload([Adapter(f"a{i}", 8, 0.5) for i in range(4)], Lengths.constant(20), Lengths.constant(10), 0.0)
    bin_ = Bin((0, 1, 2, 3), Settings(4, 8), profile)
    (report,) = Validation(launch, fleet, [bin_], tmp_path / "validate", ValidationSpec(duration_s=10.0)).run()
    assert report.failure is None
    assert report.memory_error == (False, False)
    measured = report.mean("measured", "total_token_throughput")
    assert measured is not None
    assert measured > 0.0
