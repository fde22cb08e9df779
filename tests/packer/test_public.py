"""The edge of the Python API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import TypeAliasType

import packer
from packer.engines import VLLM
from packer.errors import PluginError, ValidationError
from packer.objectives.base import Objective
from packer.papers.lightllm.engine import LightLlm
from packer.public import public
from packer.solvers.base import Problem, Solution
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.twin.cluster.caching import LRU

FLEET, SERVER = random_fleet(3, seed=0, rates=(0.1,)), small_profile()
CLUSTER = packer.Cluster.of(SERVER, 1, max_loras=4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: packer.Arrivals(factors=2), "factors of Arrivals to be a sequence of numbers, got 2"),
        (lambda: packer.Goal(packer.Limits(), classes=None), r"of tuples \(text, a Limits\), got None"),
        (lambda: packer.Bin((0,), SERVER.settings(1, 8), None), "a server to be a Profile"),
        (lambda: packer.Change(0.0, stop=0), "stop of Change to be a sequence of whole numbers, got 0"),
        (lambda: packer.Cluster(CLUSTER.kinds, CLUSTER.servers, store=1), "to be a Store or None, got 1"),
        (lambda: packer.Workload(FLEET.adapters, name=None), "name to be a str"),
        (lambda: packer.drift(None, FLEET), r"plan to be a Plan \(packer.load_plan\(FILE\)\), got None"),
        (lambda: packer.schedule(None, SERVER, {"a": [1]}), "got None"),
        (lambda: packer.frontier(FLEET, SERVER, max_gpus="x"), "max_gpus to be a whole number or None, got 'x'"),
        (lambda: packer.recommend(FLEET, SERVER, log_hour=True), "to be a RequestTrace or None, got True"),
        (lambda: packer.compare_systems(FLEET, CLUSTER, "vllm"), "systems to be a sequence of .* got 'vllm'"),
        (lambda: packer.recommend(FLEET, map(str, (1,))), "sequence of Profile objects .* got \\('1',\\)"),
        (lambda: packer.compare_systems(FLEET, CLUSTER, ["vllm"], jobs=0), "jobs .* got 0"),
        (lambda: packer.compare_systems(FLEET, CLUSTER, ["vllm"], backend="x"), "backend to be one of"),
        (lambda: packer.simulate_cluster(FLEET, CLUSTER, duration_s=1.0, paced=2), "paced to be True or False"),
        (lambda: packer.simulate_cluster(FLEET, CLUSTER, duration_s=1.0, controller=[]), "a Controller or None"),
    ],
)
def test_arguments_of_another_type_are_named(call, says: str) -> None:
    """An argument or field of another type than declared is refused by its name, whatever it would lead to."""
    with pytest.raises(ValidationError, match=says):
        call()


def boom(self: object, *args: object) -> object:
    """Raise as a strategy with a bug does."""
    raise RuntimeError("bad day")


class Found:
    """A solver whose solution is given."""

    name = "found"

    def supports(self, problem: Problem) -> str | None:
        """It takes every problem."""
        return None

    def solve(self, problem: Problem) -> Solution:
        """All adapters on one server."""
        return Solution((packer.Bin((0, 1, 2), SERVER.settings(4, 32), SERVER),), **self.more)


class Holding:
    """A router that keeps all requests."""

    name = "holding"

    def supports(self, cluster, workload) -> str | None:
        """It takes every cluster."""
        return None

    def start(self, view, seed) -> None:
        """Nothing to begin."""

    def route(self, request, view) -> int:
        """None for now."""
        return -1


class Ticking:
    """A cache policy that does nothing."""

    name, rule, high_water, takes_memory, period_s = "ticking", LRU, 1.0, True, 1.0

    def start(self, view, seed) -> None:
        """Nothing to begin."""

    def tick(self, now_s, view):
        """No moves."""
        return ()


def solved(**given: object) -> packer.Plan:
    """The plan of strategies given as objects."""
    found = {"predictor": AnalyticPredictor(), "with_headroom": False, "verify": False, **given}
    return packer.solve(FLEET, SERVER, **found)


def made(kind: type, **members: object) -> object:
    """A strategy of this class with other members."""
    return type(kind.__name__, (kind,), {"name": "mine", **members})()


def simulated(**given: object) -> object:
    """A run on a cluster with strategies given as objects."""
    engine = given.pop("engine", LightLlm() if "cache" in given else VLLM)
    cluster = packer.Cluster((replace(CLUSTER.kinds[0], engine=engine),), CLUSTER.servers)
    return packer.simulate_cluster(FLEET, cluster, duration_s=1.0, **given)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: solved(objective=made(Objective, key=boom)), "objective 'mine' .* raised RuntimeError: bad day"),
        (lambda: solved(objective=made(Objective, limits=property(boom))), "objective 'mine' .*raised Runtime"),
        (lambda: solved(objective=made(Objective, limits=[1])), "objective 'mine' .*may break its contract"),
        (lambda: solved(solver=made(Found, supports=boom)), "solver 'mine' .*raised RuntimeError: bad day"),
        (lambda: solved(solver=made(Found, more={"reasons": "text"})), "solver 'mine'.*reasons .*got 'text'"),
        (lambda: simulated(router=made(Holding, start=boom)), "router 'mine' .*raised RuntimeError: bad day"),
        (lambda: simulated(engine=made(LightLlm, kernels=boom)), "engine 'mine' .*raised RuntimeError: bad"),
        (lambda: simulated(engine=made(LightLlm, prepare=lambda *_: 5)), "engine 'mine' .*break its contract"),
        (lambda: simulated(cache=made(Ticking, start=boom)), "cache 'mine' .*raised RuntimeError: bad day"),
    ],
)
def test_errors_of_strategies_given_as_objects_name_them(call, says: str) -> None:
    """A strategy that is given as an object is named by errors of its code, and by what its answers lead to."""
    with pytest.raises(PluginError, match=says):
        call()


@pytest.mark.parametrize("limit", [np.nan, np.inf, -1.0])
def test_limits_of_an_objective_are_numbers_that_a_file_can_have(limit: float) -> None:
    """An objective whose limit no plan file can have is refused before the search."""
    with pytest.raises(ValidationError, match="mean_itl_ms, a limit of the objective 'mine'"):
        solved(objective=made(Objective, limits={"mean_itl_ms": limit}))


def test_names_of_strategies_are_words() -> None:
    """A strategy without a name is refused: the plan's file would be refused when read again."""
    with pytest.raises(ValidationError, match="the name of the solver to be text"):
        solved(solver=made(Found, name=""))


class Own:
    """A predictor of another package, also a callback that ends what calls it."""

    name = "own"
    evaluate = AnalyticPredictor().evaluate

    def __call__(self, *args: object) -> None:
        """End the call."""
        raise RuntimeError("bad day")


@pytest.mark.parametrize("ended", [boom, Own(), partial(boom, 1)])
def test_errors_of_callbacks_pass_unchanged(ended: Callable[..., None]) -> None:
    """What a function among the arguments raises ends the call as it is, so that a caller can end a search."""
    with pytest.raises(RuntimeError, match="bad day"):
        solved(predictor=Own(), progress=ended)


def test_wrong_arguments_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    """A refused call has written no file."""
    with pytest.raises(ValidationError, match="force to be True or False, got 2"):
        solved().save(tmp_path / "plan.json", force=2)
    assert not (tmp_path / "plan.json").exists()


def test_iterators_and_infinite_limits_are_taken() -> None:
    """Items may come from an iterator, and a mapping may say that a latency has no limit."""
    plan = solved(slo={"p95_ttft_ms": np.inf, "mean_itl_ms": 500.0})
    found = packer.evaluate_plan(plan, add=iter([packer.Adapter("late", 8, 0.1)]), duration_s=9.0)
    assert found.plan.workload.names[-1] == "late"


Columns = TypeAliasType("Columns", dict[str, npt.NDArray[np.float64]])


@public
def of_columns(columns: Columns) -> None:
    """Take a mapping, by an alias as NumPy 2.5 has for arrays."""


def test_aliases_of_types_are_read() -> None:
    """A wrong value for a type that is an alias is named as for the type itself."""
    of_columns({"a": np.zeros(2)})
    with pytest.raises(ValidationError, match="Expected columns to be a mapping of texts to ndarray objects, got"):
        of_columns([1.0])  # type: ignore[arg-type]


def test_numbers_of_numpy_are_those_of_python() -> None:
    """A seed of 8 bits gives the same plan as the same seed of Python: seeds of fresh hours do not overflow."""
    first, again = (packer.evaluate_plan(solved(), seed=seed, duration_s=9.0) for seed in (7, np.uint8(7)))
    assert repr(first) == repr(again)


def test_wrong_numbers_and_names_of_arguments_are_type_errors() -> None:
    """A call with an argument that the function lacks is Python's own error."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'gpus'"):
        public(lambda: None)(gpus=1)
