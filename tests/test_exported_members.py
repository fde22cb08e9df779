"""The public surface is what scripts rely on: it changes on purpose or not at all."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import packer

ELSEWHERE = "packer.twin.live.inside."
"""Modules that run in the environment of the server, with its packages."""

PUBLIC = [
    "Adapter",
    "Arrivals",
    "Bin",
    "Cluster",
    "Evaluation",
    "Evaluations",
    "FineTuning",
    "GpuKind",
    "Lengths",
    "Limits",
    "PackerError",
    "Plan",
    "Profile",
    "RequestTrace",
    "Simulation",
    "Slo",
    "Status",
    "Workload",
    "__version__",
    "compare_systems",
    "drift",
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
        missing += [
            f"{info.name}.{name}" for name in getattr(module, "__all__", ()) if not hasattr(module, name)
        ]
    assert missing == []
