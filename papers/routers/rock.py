"""Router "rock": queues of similar tasks, matched with servers periodically."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer import checks
from packer.twin.cluster.routers.base import AnyCluster, Request

if TYPE_CHECKING:
    from packer.twin.cluster.view import ClusterView


@dataclass
class Rock(AnyCluster):
    """ROCK's task router (section 4.1, Algorithm 1).

    A task is a vector of iterations and adapter bytes. A Gaussian mixture over the tasks of a period assigns them to
    `queues` queues (0: half the number of servers). It is fitted again if the tasks of the last period are distributed
    differently over the queues: if the Kullback-Leibler divergence from the period of the last fit exceeds `theta`, or
    if `theta` is 0. Every `period_s` the weight of a queue at a server is the sum of `cached` × share of its adapters
    on that GPU, `idle` × (1 − distance of the busy share from `use`), and `time` / expected seconds of the queue's
    tasks. The `top` servers with the highest weights are the queue's candidates.

    `dispatch` "single" is Algorithm 1: the tasks of the last period form the queues, and all tasks of a queue in the
    next period go to the candidate that makes the busy shares most equal. The other values are other readings of the
    paper. "fastest" sends a task to the candidate that is expected to finish it first. "free" matches waiting tasks:
    while servers are free, only the task that has just arrived. It goes to the least busy of the `top` free servers by
    weight, or without a free server to the one that is expected to finish it first. Before the first matching, or if no
    candidate may serve the adapter, all servers that may are candidates. The paper gives neither the number of queues
    nor `theta`; its classes and tolerances of tasks do not exist in a workload.
    """

    name = "rock"
    cached: float = 0.6
    idle: float = 0.3
    time: float = 0.1
    use: float = 0.7
    top: int = 3
    period_s: float = 90.0
    queues: int = 0
    dispatch: str = "single"
    theta: float = 0.1
    _mixture: Any = field(init=False, repr=False, default=None)
    _seed: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        for name in ("cached", "idle", "time", "use", "theta"):
            checks.real(name, getattr(self, name), low=0.0)
        checks.integer("top", self.top, low=1)
        checks.integer("queues", self.queues, low=0)
        checks.choice("dispatch", self.dispatch, ("free", "fastest", "single"))

    def start(self, view: ClusterView, seed: int) -> None:
        """Start without known tasks, queues and candidates."""
        self._mixture, self._seed = None, seed
        self._servers, self._seen = list[list[int]](), list[tuple[int, float, int]]()
        self._seconds = dict[tuple[int, int], FloatArray]()
        self._busy_s, self._use = np.zeros(len(view.cluster)), np.zeros(len(view.cluster))
        self._standing: list[FloatArray] = [self._use.copy()]

    def route(self, request: Request, view: ClusterView) -> int:
        """Choose one of the candidates of the task's queue."""
        size = float(view.adapter_bytes[request.adapter])
        self._seen.append((request.iterations, size, request.adapter))
        allowed: list[int] = view.candidates(request.adapter).tolist()
        queue = 0 if self._mixture is None else self._queue_of(request.iterations, size)
        held, jobs = view.on_gpu(request.adapter), view.running + view.waiting
        service_s = self._service_s(request.iterations, request.adapter, view)
        load_s = np.where(held, 0.0, view.load_s(request.adapter))
        free = [s for s in allowed if jobs[s] < view.places[s]]
        if self.dispatch == "free" and free:
            weight = self.cached * held + self._standing[queue]
            # Servers of equal weight take turns.
            free.sort(key=lambda s: (-weight[s], (s - request.number) % len(weight)))
            server = min(free[: self.top], key=lambda s: self._use[s])
            self._use[server] += (service_s + load_s)[server] / self.period_s / view.places[server]
            return server
        if self.dispatch != "free" and self._mixture is not None:
            allowed = [s for s in self._servers[queue] if s in allowed] or allowed
        ends_s = service_s * np.maximum(1.0, (jobs + 1) / view.places) + load_s
        return int(min(allowed, key=lambda s: (ends_s[s], s)))

    def _queue_of(self, iterations: float, size: float) -> int:
        """The queue of a task: the component of the mixture that it most likely belongs to."""
        mixture, mean, scale = self._mixture
        away = (np.array([iterations, size]) - mean) / scale - mixture.means_
        # Log-densities of the components, without constants.
        spread = np.log(mixture.covariances_) + away**2 / mixture.covariances_
        return int(np.argmax(np.log(mixture.weights_) - spread.sum(axis=1) / 2))

    def _service_s(self, iterations: int, adapter: int, view: ClusterView) -> FloatArray:
        """Time of the job on each server, without the load."""
        if (iterations, adapter) not in self._seconds:
            self._seconds[iterations, adapter] = view.service_s(iterations, adapter)
        return self._seconds[iterations, adapter]

    def tick(self, now_s: float, view: ClusterView) -> None:
        """Match the queues with servers. Cluster the tasks again first if their distribution has changed."""
        tasks, self._seen = self._seen, []
        busy = np.minimum(1.0, (view.busy_s - self._busy_s) / self.period_s)
        self._busy_s, self._use = view.busy_s, busy.copy()
        vectors = np.array([task[:2] for task in tasks]).reshape(-1, 2)
        queue = self._clustered(vectors, self.queues or max(1, len(view.cluster) // 2))
        if queue is not None:
            self._servers = self._matched(queue, tasks, busy, view)

    def _clustered(self, vectors: FloatArray, count: int) -> IntArray | None:
        """The queue of each task; None if there are too few distinct tasks: the last matching then stays valid."""
        if self._mixture is not None and len(vectors):
            known = np.array([self._queue_of(*vector) for vector in vectors])
            if 0.0 < self.theta >= divergence(_spread(known, count), self._reference):
                return known
        if len(distinct(vectors, axis=0)) < count:
            return None
        from sklearn.mixture import GaussianMixture

        mean, scale = vectors.mean(axis=0), np.maximum(vectors.std(axis=0), 1e-9)
        mixture = GaussianMixture(count, covariance_type="diag", max_iter=1000, random_state=self._seed, reg_covar=1e-3)
        queue: IntArray = mixture.fit_predict((vectors - mean) / scale)
        self._mixture = mixture, mean, scale
        self._reference: FloatArray = _spread(queue, count)
        return queue

    def _matched(
        self, queue: IntArray, tasks: list[tuple[int, float, int]], busy: FloatArray, view: ClusterView
    ) -> list[list[int]]:
        """Candidates of each queue by weight; for "single" the one that makes the busy shares most equal."""
        count, use = int(queue.max()) + 1, busy.copy()
        found: list[list[int]] = []
        self._standing = []
        for j in range(max(count, self.queues or len(view.cluster) // 2)):
            own = [task for task, k in zip(tasks, queue, strict=True) if k == j]
            adapters = sorted({adapter for _, _, adapter in own})
            held = np.mean([view.on_gpu(a) for a in adapters], axis=0) if adapters else np.ones(len(use))
            seconds = sum((self._service_s(n, a, view) + view.load_s(a) for n, _, a in own), np.zeros(len(use)))
            self._standing.append(self.idle * (1 - np.abs(busy - self.use)) + self.time / np.maximum(seconds, 1e-9))
            best = np.argsort(-self.cached * held - self._standing[-1], kind="stable")[: self.top].tolist()
            load = seconds / self.period_s / (1 if self.dispatch == "single" else len(best))
            if self.dispatch == "single":
                best = [min(best, key=lambda s: (np.std(use + load * (np.arange(len(use)) == s)), s))]
            use[best] += load[best]
            found.append(best)
        return found


def _spread(queue: IntArray, count: int) -> FloatArray:
    """Share of the tasks in each of `count` queues, after adding one task to each queue."""
    counts = np.bincount(queue, minlength=count) + 1.0
    return np.asarray(counts / counts.sum())


def divergence(current: FloatArray, reference: FloatArray) -> float:
    """Kullback-Leibler divergence of two distributions without zeros, in nats."""
    return float((current * np.log(current / reference)).sum())
