"""packer: how many GPUs a fleet of LoRA adapters needs, and which adapter goes where.

    >>> import packer
    >>> profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    >>> fleet = packer.Workload([packer.Adapter(f"a{i}", rank=8, rate=0.1) for i in range(64)])
    >>> plan = packer.solve(fleet, profile, objective="gpus")

Names are loaded at first use (PEP 562), so that `packer --help` starts fast.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packer.adapter import Adapter as Adapter
    from packer.arrival import Arrivals as Arrivals
    from packer.arrival import RequestTrace as RequestTrace
    from packer.bin import Bin as Bin
    from packer.cluster import Cluster as Cluster
    from packer.errors import PackerError as PackerError
    from packer.evaluation import Evaluation as Evaluation
    from packer.evaluation import Evaluations as Evaluations
    from packer.gpu import GpuKind as GpuKind
    from packer.io.clusters import read_cluster as read_cluster
    from packer.io.plans import read_plan
    from packer.io.profiles import load_profile as load_profile
    from packer.io.workloads import read_workload as read_workload
    from packer.job import FineTuning as FineTuning
    from packer.lengths import Lengths as Lengths
    from packer.operate.drift import drift as drift
    from packer.operate.evaluate import evaluate_plan as evaluate_plan
    from packer.operate.frontier import frontier as frontier
    from packer.operate.recommend import recommend as recommend
    from packer.operate.schedule import schedule as schedule
    from packer.operate.systems import compare_systems as compare_systems
    from packer.plan import Plan as Plan
    from packer.plan import Status as Status
    from packer.predictors.api import evaluate_server as evaluate_server
    from packer.predictors.api import load_predictor as load_predictor
    from packer.profile import Profile as Profile
    from packer.slo import Limits as Limits
    from packer.slo import Slo as Slo
    from packer.solvers.api import solve as solve
    from packer.twin.cluster.simulate import simulate_cluster as simulate_cluster
    from packer.twin.result import Simulation as Simulation
    from packer.twin.simulate import simulate as simulate
    from packer.workload import Workload as Workload

    load_plan = read_plan

_HOME = {
    "Adapter": "packer.adapter:Adapter",
    "Arrivals": "packer.arrival:Arrivals",
    "Bin": "packer.bin:Bin",
    "Cluster": "packer.cluster:Cluster",
    "Evaluation": "packer.evaluation:Evaluation",
    "Evaluations": "packer.evaluation:Evaluations",
    "FineTuning": "packer.job:FineTuning",
    "GpuKind": "packer.gpu:GpuKind",
    "Lengths": "packer.lengths:Lengths",
    "Limits": "packer.slo:Limits",
    "PackerError": "packer.errors:PackerError",
    "Plan": "packer.plan:Plan",
    "Profile": "packer.profile:Profile",
    "RequestTrace": "packer.arrival:RequestTrace",
    "Simulation": "packer.twin.result:Simulation",
    "Slo": "packer.slo:Slo",
    "Status": "packer.plan:Status",
    "Workload": "packer.workload:Workload",
    "compare_systems": "packer.operate.systems:compare_systems",
    "drift": "packer.operate.drift:drift",
    "evaluate_plan": "packer.operate.evaluate:evaluate_plan",
    "evaluate_server": "packer.predictors.api:evaluate_server",
    "frontier": "packer.operate.frontier:frontier",
    "load_plan": "packer.io.plans:read_plan",
    "load_predictor": "packer.predictors.api:load_predictor",
    "load_profile": "packer.io.profiles:load_profile",
    "read_cluster": "packer.io.clusters:read_cluster",
    "read_workload": "packer.io.workloads:read_workload",
    "recommend": "packer.operate.recommend:recommend",
    "schedule": "packer.operate.schedule:schedule",
    "simulate": "packer.twin.simulate:simulate",
    "simulate_cluster": "packer.twin.cluster.simulate:simulate_cluster",
    "solve": "packer.solvers.api:solve",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        try:
            value: Any = version("adapter-packer")
        except PackageNotFoundError:
            value = "0+unknown"
    elif name in _HOME:
        module, attribute = _HOME[name].split(":")
        value = getattr(import_module(module), attribute)
    else:
        raise AttributeError(f"module 'packer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
