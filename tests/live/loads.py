"""What the tests of the load generator send, and to which server."""

from __future__ import annotations

from packer.live.load import LoadJob
from packer.live.server import ServerOptions
from packer.settings import Settings
from packer.twin.arrivals import draw_requests
from packer.workload import Workload

SLOTS = ServerOptions(tuple((f"a{i}", "x") for i in range(4)), Settings(4, 8))


def job(url: str, fleet: Workload, duration_s: float = 0.7) -> LoadJob:
    """The fleet's requests for a short time."""
    requests = draw_requests(fleet, duration_s, 0)
    return LoadJob(url, fleet.names, requests, duration_s, token_ids=(4, 100), metrics_interval_s=0.5)
