"""An autoscaler that follows the load: what a schedule is compared with."""

from __future__ import annotations

import numpy as np

from packer.arrival import RequestTrace
from packer.cluster import Cluster
from packer.operate.replay import Window


def reactive(
    trace: RequestTrace,
    server: Cluster,
    capacity_tok_s: float,
    *,
    interval_s: float = 300.0,
    startup_s: float = 120.0,
    target: float = 0.8,
    router: str = "affinity",
) -> list[Window]:
    """Windows of an autoscaler that follows the load, as Kubernetes' HPA does.

    Every `interval_s` it takes as many servers as the load of the last interval needs at the target utilisation;
    those that are added serve `startup_s` later. Every server may serve every adapter.

    Parameters
    ----------
    server
        A cluster of one server; it is resized.
    capacity_tok_s
        Load that one server serves.
    target
        Share of the capacity that is to be used.
    """
    tokens = (trace.input_tokens + trace.output_tokens).astype(np.float64)
    edges = np.arange(0.0, trace.span_s + 1e-9, interval_s)
    loads = np.histogram(trace.time_s, bins=np.append(edges, edges[-1] + interval_s), weights=tokens)[0] / interval_s
    wanted = np.maximum(1, np.ceil(loads / (target * capacity_tok_s))).astype(int).tolist()
    windows: list[Window] = []
    running = wanted[-1]
    for k, start_s in enumerate(edges.tolist()):
        end_s = min(start_s + interval_s, trace.span_s)
        if end_s <= start_s:
            break
        needed = wanted[k - 1]
        ready_s = min(start_s + startup_s, end_s) if needed > running else start_s
        for begin_s, stop_s, count in ((start_s, ready_s, running), (ready_s, end_s, needed)):
            if stop_s > begin_s:
                if windows and len(windows[-1].cluster) == count:
                    windows[-1] = Window(windows[-1].start_s, stop_s, windows[-1].cluster, router)
                else:
                    windows.append(Window(begin_s, stop_s, server.resized(count), router))
        running = needed
    return windows
