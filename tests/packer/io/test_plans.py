"""Plan files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.errors import FileFormatError, OutputError
from packer.evaluation import Evaluations
from packer.io.plans import plan_to_dict, read_plan, write_plan
from packer.plan import Moves, Plan, Status


@pytest.fixture
def plan(toy_plan: Callable[..., Plan]) -> Plan:
    """A plan with replicas, missing figures, a bound and an adapter without a place."""
    made = toy_plan([f"a{i}" for i in range(6)], gpus=2, replicated=True)
    ttft = made.evaluations.mean_ttft_ms.copy()
    ttft[0] = math.nan
    return replace(
        made,
        evaluations=replace(made.evaluations, mean_ttft_ms=ttft),
        objective_value=(2.0,),
        lower_bound=1.0,
        bound_source="by hand",
        verified=True,
        bound_proven=True,
        margin=0.05,
        headroom=(1.2, None),
        moves=Moves((2,), (1, None)),
        interrupted=True,
        time_limit_reached=True,
        details={"patterns": 7},
    )


def same(one: Evaluations, other: Evaluations) -> bool:
    """Whether all columns agree, NaN where NaN is."""
    return all(
        np.array_equal(
            getattr(one, c.name), getattr(other, c.name), equal_nan=getattr(one, c.name).dtype != bool
        )
        for c in fields(Evaluations)
    )


def test_a_plan_comes_back_as_it_was(plan: Plan, tmp_path: Path) -> None:
    """Everything needed to judge, export or replan survives the file, NaN included."""
    write_plan(plan, tmp_path / "plan.json")
    back = read_plan(tmp_path / "plan.json")
    for item in fields(Plan):
        if item.name != "evaluations":
            assert getattr(back, item.name) == getattr(plan, item.name), item.name
    assert same(back.evaluations, plan.evaluations)
    assert plan_to_dict(back) == plan_to_dict(plan)


def test_unplaced_adapters_come_back_by_name(plan: Plan, tmp_path: Path) -> None:
    """An infeasible plan keeps what it holds and names what it does not."""
    kept = plan.bins[:1]
    placed = {i for i, share in zip(kept[0].adapters, kept[0].shares, strict=True) if share == 1}
    whole = replace(kept[0], adapters=tuple(sorted(placed)), shares=())
    left = tuple(sorted(set(range(6)) - placed))
    partial = replace(
        plan,
        bins=(whole,),
        evaluations=Evaluations.of([plan.evaluations[0]]),
        status=Status.INFEASIBLE,
        unplaced=left,
        reasons=("too little",),
    )
    write_plan(partial, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").unplaced == left


def test_an_existing_file_needs_force(plan: Plan, tmp_path: Path) -> None:
    """Nothing is overwritten unasked."""
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    with pytest.raises(OutputError, match="--force"):
        write_plan(plan, path)
    write_plan(plan, path, force=True)


def damaged(data: dict[str, Any], change: str) -> str:
    """The plan's text with one thing broken."""
    gpu = data["gpus"][0]
    match change:
        case "cut":
            return json.dumps(data)[:200]
        case "list":
            return "[1, 2]"
        case "schema":
            data["schema"] = 99
        case "unknown key":
            data["gpu"] = []
        case "missing key":
            del data["status"]
        case "adapter":
            gpu["adapters"][0] = "nobody"
        case "twice":
            gpu["adapters"] = gpu["adapters"] + [gpu["adapters"][0]]
        case "lost":
            data["gpus"] = data["gpus"][:1]
        case "profile":
            gpu["profile"] = "none"
        case "slot":
            gpu["max_lora_rank"] = 7
        case "number":
            gpu["evaluation"]["offered_tok_s"] = "many"
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("cut", "expected JSON"),
        ("list", "expected a plan"),
        ("schema", "expected 2, got 99"),
        ("unknown key", "unknown key"),
        ("missing key", "status"),
        ("adapter", "no adapter 'nobody'"),
        ("twice", "gpus.0"),
        ("lost", "is placed"),
        ("profile", "no profile 'none'"),
        ("slot", "one of 1, 8, 16"),
        ("number", "gpus.0.evaluation.offered_tok_s"),
    ],
)
def test_a_damaged_file_says_what_is_wrong(plan: Plan, tmp_path: Path, change: str, says: str) -> None:
    """A file that was cut or edited wrongly is refused with its name and the key."""
    path = tmp_path / "plan.json"
    path.write_text(damaged(plan_to_dict(plan), change))
    with pytest.raises(FileFormatError, match=says) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)
