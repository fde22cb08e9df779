"""How long servers with parts of adapters are simulated."""

from __future__ import annotations

from packer.bin import Bin
from packer.times import HOUR_S
from packer.workload import Workload

MOST_PARTS = 64  # Most hours for which a server with parts of adapters is simulated.
MANY_REQUESTS = 300_000  # Number of requests from which longer runs of a small part hardly change its 95th percentile.


def parts_s(item: Bin, workload: Workload) -> float | None:
    """Return the simulated time of a server that only has parts of adapters, s; None: as any other.

    The 95th percentile of an adapter is that of its requests to all its servers. If hours are alike, a server that has
    a k-th of an adapter gets as many requests in k hours. One of more than `MOST_PARTS` parts is simulated until
    `MANY_REQUESTS` came, for at least an hour.

    `workload`: the traffic of the server.
    """
    arrivals = workload.arrivals
    alike = arrivals.kind == "poisson" and arrivals.own is None and not workload.has_sessions
    if not (alike and item.is_split and max(item.shares) < 1.0):
        return None
    long_s = HOUR_S * min(round(1.0 / max(item.shares)), MOST_PARTS)
    if MOST_PARTS * max(item.shares) >= 1.0:
        return long_s
    return min(long_s, max(HOUR_S, MANY_REQUESTS / workload.rate))
