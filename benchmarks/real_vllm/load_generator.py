"""How well the load generator keeps its schedule: 200 requests a second on one core, fake server."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from packer import Adapter, Lengths, Workload
from packer.engine_spec import EngineSpec
from packer.live.launch import Launch
from packer.live.load import LoadJob, run_job
from packer.live.server import LiveServer, ServerOptions
from packer.profile import GpuSpec, ModelSpec
from packer.settings import Settings
from packer.twin.arrivals import draw_requests

RATE = 200.0
SECONDS = 30.0
FAKE = Path(__file__).parents[2] / "tests" / "live" / "fake_server.py"


def measure_schedule(folder: Path) -> dict[str, Any]:
    """Lateness of sending, ms, with streams of 10 tokens on average; server and client on a core each."""
    cores = sorted(os.sched_getaffinity(0))
    launch = Launch(
        "fake",
        "none",
        "x",
        EngineSpec("fake", "0", 4096, 4096, 256),
        ModelSpec("none", 1.0, 1.0, 1.0),
        GpuSpec("none", 1.0),
        python=sys.executable,
        command=("{python}", str(FAKE)),
        step_log=False,
        server_cores=(cores[0],) if len(cores) > 1 else (),
        environment={"FAKE_STEP_S": "0.02"},
    )
    fleet = Workload([Adapter("a0", 8, RATE)], Lengths.gamma(100.0, 1.0), Lengths.gamma(10.0, 0.8), 0.0)
    requests = draw_requests(fleet, SECONDS, 0)
    with LiveServer(launch, ServerOptions((("a0", "x"),), Settings(1, 8)), folder) as server:
        failure = server.start()
        if failure is not None:
            raise SystemExit(failure.message)
        job = LoadJob(server.url, ("a0",), requests, SECONDS, drain_s=20.0, cores=tuple(cores[-1:]))
        result = run_job(job, folder)
    summary = result.summary()
    keys = ("completed", "failed", "send_lateness_p99_ms", "send_lateness_max_ms", "median_ttft_ms")
    return {"rate": RATE, "seconds": SECONDS, "sent": len(requests)} | {key: summary[key] for key in keys}
