"""Routers choose the server of each request. There are three kinds, by the state that they need.

A static router assigns all requests at once, without the state of the servers. A scoring router computes a score of
each server from its state, in compiled code; the request goes to the server with the smallest score. Any other object
with `route` is called in Python for each request. A third-party package registers a class under the entry-point group
`packer.routers`; the fields of its dataclass are the router's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from packer.arrays import FloatArray, IntArray
from packer.cluster import Cluster
from packer.twin.cluster.candidates import Candidates
from packer.twin.engine.content import Content
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.twin.cluster.state import Servers
    from packer.twin.cluster.view import ClusterView


HOOKS = ("score", "survey", "note", "among", "worth", "sent")
"""Compiled functions of a router that replace those in `packer.twin.cluster.events`."""
HOLD = -1  # Instead of a server: the request, and those behind it, wait at the router until a server has room.


@dataclass(frozen=True, slots=True)
class Request:
    """The data of a request that a router gets.

    `number`: position in the order of arrival. `adapter`: index into the workload. `time_s`: when it arrived.
    `iterations`: of a job (`packer.papers.jobs`), known when the job is sent. For a language model this field is the
    output length, which a real router does not know.
    """

    number: int
    adapter: int
    rank: int
    input_tokens: int
    time_s: float
    iterations: int


@dataclass(frozen=True, slots=True)
class Resend:
    """Send a request that a server has accepted, but not finished, to another server."""

    request: int
    server: int


@runtime_checkable
class Router(Protocol):
    """Any router; each is also of one of the three kinds below."""

    name: str

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Return why this router can't serve this cluster, as a message; None if it can."""


@runtime_checkable
class StaticRouter(Router, Protocol):
    """A router that decides without the state of the servers. If its attribute `keeps_sessions` is true, it is asked
    about the first request of each session, and the session's other requests follow."""

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """The server of each request, int64 (n,), from its adapter, int64 (n,), in order of arrival."""


@runtime_checkable
class ReadingRouter(Router, Protocol):
    """A router that is called in Python for each request, with the current state of the servers.

    If its attribute `relocates` is true, every server whose slots hold the rank may serve an adapter; the cluster's
    placement then only says where adapters are at first.
    """

    def start(self, view: ClusterView, seed: int) -> None:
        """Called once before the first request."""

    def route(self, request: Request, view: ClusterView) -> int:
        """Return the number of a server that may serve the adapter (`view.candidates`), or HOLD."""


@runtime_checkable
class TickingRouter(Router, Protocol):
    """A router that also acts every `period_s`."""

    period_s: float

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Resend] | None:
        """Called with the current state of the servers; returns requests to move to other servers."""


class AnyCluster:
    """Base of the routers that serve every cluster."""

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Supports every cluster."""
        return None


class VllmServers:
    """Base of the routers that read vLLM's metrics."""

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Supports servers of vLLM only."""
        others = [kind.engine.name for kind in cluster.kinds if kind.engine.name != "vllm"]
        return f"it reads vLLM's metrics, and a server runs {others[0]!r}" if others else None


class ScoringRouter(AnyCluster):
    """Base of the routers with a compiled score, `score(servers, parameters, server, request)`: Numba's `njit`.

    `packer.twin.cluster.loop` compiles the event loop for it. The server with the smallest score gets the request, the
    next in turn among equal ones; if all scores are infinite, the request is held. A router may define others of
    `HOOKS`, with which most servers need no score: see `packer.twin.cluster.events`.
    """

    name: ClassVar[str]
    score: ClassVar[Any]
    reads_prompts: ClassVar[bool] = False

    def parameters(self, cluster: Cluster, workload: Workload) -> FloatArray:
        """Return what the functions get: the fields, then the mean output tokens of a request."""
        own: Any = self
        return self.numbers(workload, *(float(getattr(self, item.name)) for item in fields(own)))

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Any:
        """Return what the functions get instead of `numbers`, with room for what they keep. `content`: which of the
        requests share prefixes."""
        return numbers

    def numbers(self, workload: Workload, *values: float) -> FloatArray:
        """Return these values, then the mean output tokens of a request."""
        return np.array([*values, np.average(workload.mean_output_tokens, weights=workload.rates)])
