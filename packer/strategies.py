"""What packer needs of its strategies: predictors, engines, and what places adapters on the servers of a cluster."""

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
    """Predicts how servers do.

    `name` is what the command line calls it. A class registered under the entry-point group
    `packer.predictors` is called as `cls.for_profile(profile, seed=…)` if it has that, else `cls()`.

    A class attribute `monotone` = True, which is not inherited, declares: whatever `max_loras` a server has, if every
    such server of some adapters starves, fails or breaks a latency limit, so does every server of at least these
    adapters, or of others of the same lengths and no lower ranks and rates in their place. Proofs that leave out such
    servers hold for these predictors alone; for all others they are estimates, and no plan is "optimal" by them.
    """

    name: str

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin of the fleet `workload`; one row per bin, in order; the same every time."""


@runtime_checkable
class TwinBased(Protocol):
    """A predictor that simulates, or learned from simulations.

    Bins of equal content get equal figures, and rates can be scaled bin by bin without a new fleet.
    `imitates_twin`: it learned from the twin, which has to confirm the plans found with it.
    """

    name: str
    imitates_twin: bool

    def evaluate(
        self, workload: Workload, bins: Sequence[Bin], factors: npt.NDArray[float64] | float = 1.0
    ) -> Evaluations:
        """As `Predictor.evaluate`, with every rate of bin k multiplied by `factors[k]`."""


@runtime_checkable
class Placement(Protocol):
    """Says which adapters each server of a cluster serves; registered under the group `packer.placements`."""

    name: str

    def place(self, workload: Workload, cluster: Cluster, seed: int) -> Cluster:
        """The cluster with a placement, and servers with slots for it; it had none.

        The workload's goal is the one by which the cluster is judged.
        Raises `IncompatibleError`: it can't place on this cluster; `ValidationError`: the fleet does not fit on it.
        """


@runtime_checkable
class SizedPlacement(Placement, Protocol):
    """A placement that also says how many servers it needs."""

    def needed(self, workload: Workload, cluster: Cluster, seed: int) -> int | None:
        """Servers like the cluster's that keep the goal; None if no number does."""


@runtime_checkable
class Engine(Protocol):
    """What a server runs; registered under the group `packer.engines`, with its settings as fields of a dataclass.

    `cells`: its KV cache is counted in cells of one token, not in blocks. `trains`: it can train beside its requests.
    `serves_base`: it takes requests without an adapter.
    `cv`: coefficient of variation of a factor on the service time of each request; 0: none. `setup` below is a
    `packer.twin.cluster.setup.Setup`, `state` a `packer.twin.engine.state.ServerState` of an idle server.
    """

    @property
    def name(self) -> str:
        """What a system calls it."""

    cells: ClassVar[bool]
    trains: ClassVar[bool]
    serves_base: ClassVar[bool]

    @property
    def cv(self) -> float:
        """See above."""

    def refusal(self, policy: str, loading: str, form: str) -> str | None:
        """Why it can't run with a cache policy, a way to load adapters and a step law of this form; None if it can."""

    def longest_request(self, setup: Any) -> int:
        """Input + output tokens of the longest request that a server takes; longer ones are cut."""

    def prepare(self, setup: Any, state: Any) -> Any:
        """The state with the engine's own settings."""

    def kernels(self) -> Any:
        """Its `packer.twin.cluster.state.EngineKernels`; None: vLLM's."""
