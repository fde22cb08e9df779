"""The public surface is what scripts rely on: it changes on purpose or not at all."""

from __future__ import annotations

import importlib
import re
from functools import partial
from typing import Any

import pytest

import packer

ELSEWHERE = "packer.live.inside."
"""Modules that run in the environment of the server, with its packages."""

PUBLIC = [
    "Adapter",
    "Arrivals",
    "Bin",
    "Blocks",
    "Change",
    "Cluster",
    "Evaluation",
    "Evaluations",
    "FineTuning",
    "Goal",
    "GpuKind",
    "Lengths",
    "Limits",
    "PackerError",
    "Plan",
    "Profile",
    "RequestTrace",
    "Run",
    "Sessions",
    "Simulation",
    "Slo",
    "Status",
    "Workload",
    "__version__",
    "compare_systems",
    "drift",
    "estimate_profile",
    "evaluate_plan",
    "evaluate_server",
    "frontier",
    "load_plan",
    "load_predictor",
    "load_profile",
    "read_cluster",
    "read_workload",
    "recommend",
    "schedule",
    "simulate",
    "simulate_cluster",
    "solve",
]


def test_public_names_are_these() -> None:
    """`packer.__all__` names exactly the promised API, sorted."""
    assert packer.__all__ == PUBLIC
    assert dir(packer) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_there(name: str) -> None:
    """Every promised name can be had from `packer` itself."""
    assert getattr(packer, name) is not None


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.islower() and not name.startswith("_")])
def test_public_functions_say_what_they_raise(name: str) -> None:
    """The docstring of a public function names the errors that a caller has to expect."""
    assert re.search(r"[Rr]aise[sd]", getattr(packer, name).__doc__ or "")


def test_unknown_name_is_an_attribute_error() -> None:
    """A lazy module must not swallow a typing mistake."""
    with pytest.raises(AttributeError, match="no_such_name"):
        packer.no_such_name  # noqa: B018


def test_names_in_all_of_each_module_exist(modules: list[Any]) -> None:
    """A name in a module's __all__ that isn't there breaks `from module import *` and misleads readers."""
    missing = []
    for info in modules:
        if info.name.endswith("__main__") or info.name.startswith(ELSEWHERE):
            continue
        module = importlib.import_module(info.name)
        missing += [f"{info.name}.{name}" for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert missing == []


FLEET = packer.Workload([packer.Adapter(f"adapter-{k}", 8, 0.1) for k in range(1000)])
SERVER = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
CLUSTER = packer.Cluster.of(SERVER, 2, max_loras=8)


def small_plan() -> packer.Plan:
    """A plan of a few adapters."""
    return packer.solve(FLEET.subset(range(40)), SERVER, verify=False, with_headroom=False)


@pytest.mark.parametrize(
    "call",
    [
        lambda: packer.simulate("fleet.csv", SERVER, max_loras=8),  # type: ignore[arg-type]
        lambda: packer.simulate(FLEET, SERVER.name, max_loras=8),  # type: ignore[arg-type]
        lambda: packer.evaluate_server(FLEET, SERVER.name, max_loras=8),  # type: ignore[arg-type]
        lambda: packer.solve("fleet.csv", SERVER),  # type: ignore[arg-type]
        lambda: packer.solve(FLEET, SERVER.name),  # type: ignore[arg-type]
        lambda: packer.solve(FLEET, SERVER, solver=3),  # type: ignore[arg-type]
        lambda: packer.solve(FLEET, SERVER, predictor=3),  # type: ignore[arg-type]
        lambda: packer.recommend(FLEET.adapters, SERVER),  # type: ignore[arg-type]
        lambda: packer.recommend(FLEET, None),  # type: ignore[arg-type]
        lambda: packer.recommend(FLEET, SERVER, slo=100),  # type: ignore[arg-type]
        lambda: packer.frontier("fleet.csv", SERVER),  # type: ignore[arg-type]
        lambda: packer.simulate_cluster(FLEET, "cluster.toml"),  # type: ignore[arg-type]
        lambda: packer.evaluate_plan("plan.json"),  # type: ignore[arg-type]
        lambda: packer.evaluate_plan(small_plan(), add=["x"]),  # type: ignore[list-item]
        lambda: packer.simulate_cluster(FLEET, CLUSTER, router=3),  # type: ignore[arg-type]
        lambda: packer.Cluster.of(SERVER.name, 2, max_loras=8),  # type: ignore[arg-type]
        lambda: packer.RequestTrace([0.0], [0], [1], [1], blocks=3),  # type: ignore[arg-type]
        lambda: packer.Workload(["a", "b"]),  # type: ignore[list-item]
    ],
)
def test_a_name_in_place_of_an_object_is_refused_with_what_gives_one(call: Any) -> None:
    """Every public call says which object it expects, and which call gives it."""
    with pytest.raises(packer.PackerError, match=r"to be .*(packer\.\w+.*|text or .*|Adapter objects), got"):
        call()


@pytest.mark.parametrize("wrong", [None, 3, b"name"])
def test_a_name_or_path_is_text(wrong: Any) -> None:
    """What names a file, a profile, a model or a GPU is refused with the rule unless it is text or a path."""
    calls: list[Any] = [packer.read_workload, packer.load_plan, packer.read_cluster, packer.load_profile]
    calls += [partial(packer.load_predictor, profile=SERVER), partial(packer.estimate_profile, gpu="h200")]
    calls += [partial(packer.estimate_profile, "Qwen/Qwen3-8B")]
    for call in calls:
        with pytest.raises(packer.PackerError, match=r"^Expected .* to be .*, got "):
            call(wrong)


def test_large_objects_print_in_a_line() -> None:
    """A fleet, a profile and a plan at a prompt are one line, however many adapters there are."""
    plan = small_plan()
    assert repr(FLEET) == "<Workload 'workload': 1,000 adapters, 100 req/s, poisson>"
    assert repr(SERVER) == f"<Profile {SERVER.name}>"
    said = "1 × H100 64GB (Llama-3.1-8B-Instruct, vLLM 0.8.5; lengths assumed): the load is served."
    assert repr(plan) == f"<Plan of 'workload' for gpus, optimal: {said}>"
