"""Protocols of packer's strategies: predictors, placements of adapters on a cluster, and engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy.typing as npt
from numpy import float64

from packer.bin import Bin
from packer.evaluation import Evaluations
from packer.workload import Workload

if TYPE_CHECKING:
    from packer.cluster import Cluster


@runtime_checkable
class Predictor(Protocol):
    """Predicts the figures of servers.

    `name` is its name on the command line. A class registered under the entry-point group `packer.predictors` is
    called as `cls.for_profile(profile, seed=…)` if it has this method, else `cls()`.

    A class attribute `monotone` = True, which is not inherited, declares: if a set of adapters starves, fails or breaks
    a latency limit with every `max_loras`, so does each superset, and each set in which adapters are replaced by others
    of the same lengths with no lower ranks and rates. Proofs that skip such sets are valid only for these predictors.
    For other predictors they are estimates, which never make a plan "optimal".
    """

    name: str

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin of the fleet `workload`: one row per bin, in order; deterministic."""


@runtime_checkable
class TwinBased(Protocol):
    """A predictor that simulates, or was trained on simulations.

    Bins of equal content get equal figures. The rates of each bin can be scaled without a new fleet.
    `imitates_twin`: the predictor was trained on the twin, and the twin must confirm plans that are found with it.
    """

    name: str
    imitates_twin: bool

    def evaluate(
        self, workload: Workload, bins: Sequence[Bin], factors: npt.NDArray[float64] | float = 1.0
    ) -> Evaluations:
        """Like `Predictor.evaluate`, with every rate of bin k multiplied by `factors[k]`."""


@runtime_checkable
class Placement(Protocol):
    """Decides which adapters each server of a cluster serves; registered under the group `packer.placements`."""

    name: str

    def place(self, workload: Workload, cluster: Cluster, seed: int) -> Cluster:
        """A cluster without a placement → the cluster with one, and with slots for it on its servers. The cluster is
        judged by the workload's goal. Raises `IncompatibleError`: this cluster is not supported; `ValidationError`: the
        fleet does not fit on it."""


@runtime_checkable
class SizedPlacement(Placement, Protocol):
    """A placement that also says how many servers it needs."""

    def needed(self, workload: Workload, cluster: Cluster, seed: int) -> int | None:
        """Number of servers like the cluster's that the goal requires; None if no number is enough."""


@runtime_checkable
class Engine(Protocol):
    """The engine of a server; registered under the group `packer.engines`, with settings as fields of a dataclass.

    `unread`: settings of the profile's engine, as `max_num_seqs`, that have no effect on it. With `block_size` among
    them, the KV cache is counted in tokens. `trains`: supports fine-tuning alongside requests. `serves_base`: supports
    requests without an adapter.
    `cv`: coefficient of variation of a random factor on each request's service time; 0: no factor. `setup` below is a
    `packer.twin.cluster.setup.Setup`, `state` a `packer.twin.engine.state.ServerState` of an idle server.
    """

    @property
    def name(self) -> str:
        """Name of the engine in the description of a system."""

    unread: ClassVar[frozenset[str]]
    trains: ClassVar[bool]
    serves_base: ClassVar[bool]

    @property
    def cv(self) -> float:
        """See the class."""

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Why the engine can't run with this cache policy, way of loading and form of step law; None if it can."""

    def longest_request(self, setup: Any) -> int:
        """Input + output tokens of the longest request that a server accepts; longer requests are cut."""

    def prepare(self, setup: Any, state: Any) -> Any:
        """The state with the engine's own settings."""

    def kernels(self) -> Any:
        """The engine's `packer.twin.cluster.state.EngineKernels`; None: vLLM's kernels."""
