"""Routers: which server gets a request. Three kinds, by the state that they need.

A static router assigns all requests at once, without the state of the servers. A scoring router gives each
server a score, compiled, from its state: the request goes to the smallest. Any other object with `route` is
called in Python for each request. A third-party package registers a class under the entry-point group
`packer.routers`; parameters of a router are the fields of its dataclass.
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
"""Compiled functions of a router in the place of those in `packer.twin.cluster.events`."""
HOLD = -1
"""Instead of a server: the request, and those behind it, wait at the router until a server has room."""


@dataclass(frozen=True, slots=True)
class Request:
    """The data of a request that a router gets.

    `number`: place in the order of arrival. `adapter`: index into the workload. `time_s`: when it arrived.
    `iterations`: of a job (`packer.papers.jobs`), known when it is sent. For a language model it
    is the output length, which is unknown when it is sent.
    """

    number: int
    adapter: int
    rank: int
    input_tokens: int
    time_s: float
    iterations: int


@dataclass(frozen=True, slots=True)
class Resend:
    """A router sends a request that a server has accepted, and not finished, to another one."""

    request: int
    server: int


@runtime_checkable
class Router(Protocol):
    """Anything that routes; in addition it is one of the three kinds below."""

    name: str

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Why this router can't serve this cluster, for people; None if it can."""


@runtime_checkable
class StaticRouter(Router, Protocol):
    """Decides without the state of the servers.

    With an attribute `keeps_sessions` that is true it is asked about the first request of each session, and the others
    follow.
    """

    def assign(self, adapter: IntArray, workload: Workload, candidates: Candidates, seed: int) -> IntArray:
        """The server of each request, int64 (n,), from its adapter, int64 (n,), in order of arrival."""


@runtime_checkable
class ReadingRouter(Router, Protocol):
    """Called in Python for each request, with the servers as they are then.

    With an attribute `relocates` that is true every server whose slots hold the rank may serve an adapter; the
    cluster's placement is only where adapters lie at first.
    """

    def start(self, view: ClusterView, seed: int) -> None:
        """Called once before the first request."""

    def route(self, request: Request, view: ClusterView) -> int:
        """A server that may serve the adapter (`view.candidates`), by its number, or HOLD."""


@runtime_checkable
class TickingRouter(Router, Protocol):
    """A router that also acts every `period_s`."""

    period_s: float

    def tick(self, now_s: float, view: ClusterView) -> Iterable[Resend] | None:
        """Called with the servers as they are then; requests that move to other servers."""


class AnyCluster:
    """Base of the routers that serve every cluster."""

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Every cluster."""
        return None


class VllmServers:
    """Base of the routers that read vLLM's metrics."""

    def supports(self, cluster: Cluster, workload: Workload) -> str | None:
        """Servers of vLLM."""
        others = [kind.engine.name for kind in cluster.kinds if kind.engine.name != "vllm"]
        return f"it reads vLLM's metrics, and a server runs {others[0]!r}" if others else None


class ScoringRouter(AnyCluster):
    """Base of the routers with a compiled score, `score(servers, parameters, server, request)`: Numba's `njit`.

    `packer.twin.cluster.loop` compiles the event loop for it. The server with the smallest score gets the request,
    the next in turn among equal ones; with only infinite scores it is held. A router may have others of `HOOKS`, with
    which most servers need no score: see `packer.twin.cluster.events`.
    """

    name: ClassVar[str]
    score: ClassVar[Any]
    reads_prompts: ClassVar[bool] = False

    def parameters(self, cluster: Cluster, workload: Workload) -> FloatArray:
        """What the functions get: the fields, the mean output tokens of a request."""
        own: Any = self
        return self.numbers(workload, *(float(getattr(self, item.name)) for item in fields(own)))

    def state(self, numbers: FloatArray, servers: Servers, content: Content) -> Any:
        """What the functions get in the place of `parameters`, with room for what they keep.

        `content`: which of the requests begin alike.
        """
        return numbers

    def numbers(self, workload: Workload, *values: float) -> FloatArray:
        """These values, then the mean output tokens of a request."""
        return np.array([*values, np.average(workload.mean_output_tokens, weights=workload.rates)])
