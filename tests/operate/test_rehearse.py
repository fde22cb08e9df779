"""Rehearsals of the live controller on a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import packer
from packer import Adapter, Profile, RequestTrace, Workload
from packer.cli import run
from packer.errors import ValidationError
from packer.io.workloads import write_workload
from packer.operate.rehearse import rehearse


@pytest.fixture
def fleet() -> Workload:
    """Three adapters that send a request a minute."""
    at_s = [20.0 * k for k in range(90)]
    trace = RequestTrace(at_s, [k % 3 for k in range(90)], [100] * 90, [20] * 90, end_s=1800.0)  # type: ignore[arg-type]
    return Workload([Adapter(f"a{k}", 8, 1 / 60) for k in range(3)]).replaying(trace)


def test_fewer_servers_than_the_plan_has_are_refused(
    fleet: Workload, server: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan's servers run at the start: a smaller maximum is an error, of servers in Python and of GPUs in the
    command, where a server may have several."""
    pair = replace(server, engine=replace(server.engine, tensor_parallel_size=2))
    plan = packer.solve(
        fleet.with_arrivals(packer.Arrivals()), pair, "latency", max_gpus=4, verify=False, with_headroom=False
    )
    assert len(plan.bins) == 2
    with pytest.raises(ValidationError, match="servers at once to be a whole number >= 2, got 1"):
        rehearse(plan, fleet, servers=1)
    plan.save(tmp_path / "plan.json")
    write_workload(fleet, tmp_path / "trace.json")
    command = ["live", "follow", str(tmp_path / "plan.json"), "--simulate", str(tmp_path / "trace.json")]
    assert run([*command, "--gpus", "3"]) == 2
    assert "Expected --gpus to be at least the plan's 4, got 3." in capsys.readouterr().err
    assert run([*command, "--gpus", "5", "-q"]) == 0
