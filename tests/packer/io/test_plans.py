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

from packer.adapter import Adapter
from packer.arrival import Arrivals, Bursts, RequestTrace
from packer.bin import Bin
from packer.errors import FileFormatError, OutputError
from packer.evaluation import Evaluations
from packer.goal import Goal
from packer.io.files import write_text
from packer.io.plans import load_plan, plan_from_dict, plan_to_dict, write_plan
from packer.io.profiles import load_profile
from packer.job import FineTuning
from packer.lengths import Lengths
from packer.operate.evaluate import evaluate_plan
from packer.plan import Moves, Plan, Status
from packer.planning.assemble import versions
from packer.planning.recommend import recommend
from packer.profile import Profile
from packer.room import Room
from packer.sessions import Sessions
from packer.testing.analytic import AnalyticPredictor
from packer.twin.hours import Hours, merged
from packer.workload import Workload

POINT = {
    "n_gpus": 2, "p95_ttft_ms": 300.0, "worst_adapter": "a0", "worst_adapter_ttft_ms": None, "mean_itl_ms": 30.0,
    "slo_attainment": 1.0, "goodput_tok_s": 900.0, "price_per_hour": None, "holds": True, "broken_later": False,
    "starving": [], "queueing": [1],
}  # fmt: skip


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
        limits={"mean_itl_ms": 100.0},
        decision="2 GPUs hold.",
        frontier=(POINT,),
        kinds=({"model": None, "kinds": "H100", "gpus": 2, "price_per_hour": 5.0, "holds": True, "chosen": True},),
        estimate_band={end: {"capacity": 1.0, "gpus": 3, "objective_value": None} for end in ("most", "fewest")},
        within_goal={"objective": "slo", "gpus": 3},
        evaluated_s=60.0,
        statistics={"patterns": 7},
    )


def same(one: Evaluations, other: Evaluations) -> bool:
    """Whether all columns agree, NaN where NaN is."""
    return all(
        np.array_equal(getattr(one, c.name), getattr(other, c.name), equal_nan=getattr(one, c.name).dtype != bool)
        for c in fields(Evaluations)
    )


def test_a_plan_comes_back_as_it_was(plan: Plan, tmp_path: Path) -> None:
    """Everything needed to evaluate, export or replan survives the file, NaN included."""
    write_plan(plan, tmp_path / "plan.json")
    back = load_plan(tmp_path / "plan.json")
    for item in fields(Plan):
        if item.name != "evaluations":
            assert getattr(back, item.name) == getattr(plan, item.name), item.name
    assert plan_from_dict(plan_to_dict(replace(plan, evaluated_s=0.0))).evaluated_s == 0.0
    assert same(back.evaluations, plan.evaluations)
    assert plan_to_dict(back) == plan_to_dict(plan)


LENGTHS = Lengths.lognormal(100, 2, high=np.int64(5000))  # type: ignore[arg-type]
TRACE = RequestTrace([0, 1], [0, 1], [9, 9], [5, 5], end_s=3, step_s=1, start_s=7)  # type: ignore[arg-type]
WHOLE: dict[str, dict[str, Any]] = {
    "lengths": {"input_tokens": LENGTHS, "output_tokens": Lengths("constant", 50), "length_correlation": 0},
    "piecewise": {"arrivals": Arrivals("piecewise", 2, period_s=60, span=3, factors=(1, 2))},
    "bursty": {"arrivals": Arrivals("bursty", common=Bursts(2, ((8, 1),)))},
    "trace": {"arrivals": Arrivals("trace", trace=TRACE)},
    "others": {"sessions": Sessions(4, 30, 20), "slo": Goal.of(500, 50), "fine_tuning": FineTuning(
        np.int64(9), Lengths.constant(300), np.int64(8), 1, 2, 28, 6)},  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_saving_a_loaded_plan_gives_the_same_bytes(plan: Plan, tmp_path: Path, kind: str) -> None:
    """Whole numbers given where a field takes any number are kept as the file gives them back: 100 as 100.0."""
    adapters = [replace(adapter, rate=1, acceptance=1) for adapter in plan.workload.adapters]
    item = plan.bins[0]
    bins = (replace(item, shares=(item.shares[0], *[1] * (len(item.adapters) - 1))), *plan.bins[1:])
    given = replace(plan, workload=Workload(adapters, **WHOLE[kind]), bins=bins)
    write_plan(given, tmp_path / "one.json")
    write_plan(load_plan(tmp_path / "one.json"), tmp_path / "two.json")
    assert (tmp_path / "two.json").read_text() == (tmp_path / "one.json").read_text()


@pytest.mark.parametrize("ended", [False, True])
def test_older_files_have_the_smallest_of_three_factors_as_headroom(plan: Plan, ended: bool) -> None:
    """A file that has three factors for each server is read, also one of a search that ended before it wrote the
    smallest of them as the headroom; a server that lacks a factor has none."""
    rooms = (Room(1.2, "slots", "4 of 4 in use", "max_loras 6"), Room(None))
    data = plan_to_dict(replace(plan, rooms=rooms))
    for gpu, starves in zip(data["gpus"], (1.6, None), strict=True):
        del gpu["room"]["headroom"]
        gpu["room"] |= {"slo": 1.2, "queue": 1.5, "starvation": starves}
    data["headroom"] = [] if ended else data["headroom"]
    assert plan_from_dict(data).rooms == rooms


def test_unplaced_adapters_come_back_by_name(plan: Plan, tmp_path: Path) -> None:
    """An infeasible plan keeps what it holds and names what it does not."""
    kept = plan.bins[:1]
    placed = {i for i, share in zip(kept[0].adapters, kept[0].shares, strict=True) if share == 1}
    whole = replace(kept[0], adapters=tuple(sorted(placed)), shares=())
    left = tuple(sorted(set(range(6)) - placed))
    row = replace(plan.evaluations[0], offered_tok_s=whole.offered_tok_s(plan.workload))
    partial = replace(
        plan,
        bins=(whole,),
        evaluations=Evaluations.of([row]),
        headroom=(),
        moves=None,
        status=Status.INFEASIBLE,
        unplaced=left,
        reasons=("too little",),
    )
    write_plan(partial, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").unplaced == left


def test_an_infinite_share_of_the_limits_comes_back(server: Profile, tmp_path: Path) -> None:
    """JSON has no infinity: a server that starves or does not start, and its adapters, get theirs back; no others."""
    fleet = Workload([Adapter("hot", 8, 90.0), Adapter("quiet", 8, 0.1), Adapter("left", 8, 0.1)])
    bins = tuple(Bin((k,), server.settings(slots, 8), server) for k, slots in enumerate((1, 100_000)))
    hours = Hours().all(bins, fleet)
    rows = Evaluations.of([hour.figures for hour in hours])
    figures = merged(fleet, bins, hours)
    plan = Plan(fleet, bins, rows, Status.INFEASIBLE, "gpus", "hand", "twin", adapters=figures, unplaced=(2,))
    write_plan(plan, tmp_path / "plan.json")
    back = load_plan(tmp_path / "plan.json")
    assert rows.slo_used.tolist() == [math.inf, math.inf]
    assert same(back.evaluations, rows)
    assert back.adapters is not None
    for one, other in zip(back.adapters, figures, strict=True):
        assert np.array_equal(one, other, equal_nan=True)
    assert np.isnan(back.adapters.slo_used[2])
    guessed = replace(rows, worst_adapter_ttft_ms=rows.slo_used * math.nan, stable=~rows.stable | True)
    write_plan(replace(plan, evaluations=guessed), tmp_path / "plan.json", force=True)
    assert np.isnan(load_plan(tmp_path / "plan.json").evaluations.slo_used).all()


def test_profiles_that_share_a_name_come_back(plan: Plan, tmp_path: Path) -> None:
    """A plan of several profiles of one name notes each of them, and its file is checked against each."""
    first, second = plan.bins
    other = replace(second, profile=replace(second.profile, engine=replace(second.profile.engine, max_num_seqs=64)))
    two = replace(plan, bins=(first, other), versions=versions([first.profile, other.profile]))
    write_plan(two, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").bins == two.bins
    data = plan_to_dict(two)
    data["versions"]["profile toy (2)"] = "0" * 16
    write_text(tmp_path / "plan.json", json.dumps(data), force=True)
    with pytest.raises(FileFormatError, match="key 'profiles'"):
        load_plan(tmp_path / "plan.json")


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
        ("lost", "placed once"),
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
        load_plan(path)
    assert str(path) in str(caught.value)


def _gpu(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["gpus"][0].update({key: value})


def _figure(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["gpus"][0]["evaluation"].update({key: value})


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "fewer slots": (_gpu("max_loras", 1), "not those that were evaluated"),
    "slots without memory": (_gpu("max_loras", 100_000), "its evaluation says that it starts, but 100000 slots"),
    "a starved server": (_figure("starved", True), "'infeasible', as server 0 fails"),
    "a server that does not start": (_figure("memory_error", True), "'infeasible', as server 0 fails"),
    "another rate": (lambda d: d["workload"]["adapters"][0].update(rate=0.2), "not those that were evaluated"),
    "another count": (lambda d: d.update(n_gpus=1), "key 'n_gpus': expected 2"),
    "another number": (_gpu("gpu", 3), "key 'gpus.0.gpu': expected 0"),
    "another gap": (lambda d: d.update(gap=0.1), "key 'gap': expected 0.5"),
    "a bound beyond the value": (lambda d: d.update(lower_bound=3.0), "key 'lower_bound': expected at most 2"),
    "a bound that is not there": (lambda d: d.update(lower_bound=None, gap=None), "key 'bound_proven'"),
    "optimal": (lambda d: d.update(status="optimal"), "attains a proven lower bound"),
    "infeasible": (lambda d: d.update(status="infeasible", gap=None), "an infeasible plan has"),
    "headroom": (lambda d: d.update(headroom=[1.0]), "key 'headroom': expected an entry for each of the 2"),
    "other headroom than the rooms": (
        lambda d: [each.update(room={"headroom": 1.5}) for each in d["gpus"]],
        "key 'headroom': expected the factors",
    ),
    "moves": (lambda d: d["moves"].update(servers=[]) or d["moves"]["servers"].extend([1]), "moves.servers"),
    "another profile": (lambda d: d["versions"].update({"profile toy": "0" * 16}), "key 'profiles'"),
    "a renamed profile": (
        lambda d: (d["profiles"]["toy"].update(name="other"), d["versions"].update({"profile toy": "0" * 16}))[0],
        r"one that the plan was made for \(profile toy\), got 'other'",
    ),
    "a negative latency": (_figure("mean_ttft_ms", -1.0), "gpus.0.evaluation.mean_ttft_ms': expected a figure >= 0"),
    "a missing evaluation": (lambda d: d["gpus"][1].pop("evaluation"), "gpus.1.evaluation"),
}


@pytest.mark.parametrize("key", ["objective", "solver", "predictor"])
@pytest.mark.parametrize("value", ["", "  "])
def test_a_plan_names_how_it_was_made(plan: Plan, tmp_path: Path, key: str, value: str) -> None:
    """A plan without an objective could not be compared with another."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan_to_dict(plan) | {key: value}))
    with pytest.raises(FileFormatError, match=f"key '{key}'"):
        load_plan(path, changed=True)


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_contradicts_itself_is_refused_until_it_is_evaluated(
    plan: Plan, tmp_path: Path, change: str
) -> None:
    """No reader acts on figures that are not those of the plan; evaluated again, the plan is whole."""
    data, path = plan_to_dict(plan), tmp_path / "plan.json"
    edit, says = CHANGES[change]
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=says):
        load_plan(path)
    again = evaluate_plan(load_plan(path, changed=True), AnalyticPredictor()).plan
    write_plan(again, path, force=True)
    assert load_plan(path).n_gpus == plan.n_gpus


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda d: d["workload"]["adapters"][1].update(rank=64), "max_lora_rank of server 1 >= 64"),
        (lambda d: d["gpus"].pop(), "to be placed once"),
        (_gpu("max_loras", 0), "max_loras"),
        (_gpu("shares", [0.1, 1.0, 1.0]), "shares that sum to"),
    ],
)
def test_a_placement_that_no_solver_makes_is_refused(
    plan: Plan, tmp_path: Path, edit: Callable[[dict[str, Any]], None], says: str, *, changed: bool
) -> None:
    """Rules of a placement hold for every file: an evaluation can't repair an adapter that no slot holds."""
    data, path = plan_to_dict(plan), tmp_path / "plan.json"
    edit(data)
    path.write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=says):
        load_plan(path, changed=changed)


def test_a_key_twice_is_refused(plan: Plan, tmp_path: Path) -> None:
    """A key with two values is refused."""
    text = json.dumps(plan_to_dict(plan))
    path = tmp_path / "plan.json"
    path.write_text(text.replace('"n_gpus": 2', '"n_gpus": 1, "n_gpus": 2'))
    with pytest.raises(FileFormatError, match="appears twice"):
        load_plan(path)


def test_details_without_a_value_are_null(plan: Plan, tmp_path: Path) -> None:
    """What a solver notes may hold NaN, infinities and tuples: JSON has null and lists."""
    path = tmp_path / "plan.json"
    details = {"tried": (1.0, math.nan), "rows": [{"itl": math.inf, "gpus": 2}]}
    write_plan(replace(plan, statistics=details), path)
    assert load_plan(path).statistics == {"tried": [1.0, None], "rows": [{"itl": None, "gpus": 2}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("frontier", [{"n_gpus": 2}]),
        ("kinds", [{"kinds": 7}]),
        ("estimate_band", {"most": {}}),
        ("decision", 5),
    ],
)
def test_what_a_plan_says_is_checked_when_it_is_read(plan: Plan, tmp_path: Path, key: str, value: object) -> None:
    """Tables and sentences are made from it, so that a damaged one is named by its key."""
    data = plan_to_dict(plan)
    data["details"][key] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=rf"key 'details\.{key}"):
        load_plan(tmp_path / "plan.json")


def test_a_value_of_the_objective_may_be_infinite(plan: Plan, tmp_path: Path) -> None:
    """The latency of a plan with a server that does not start comes back from its file."""
    path = tmp_path / "plan.json"
    lost = replace(plan, status=Status.INFEASIBLE, reasons=("it does not start",), bound_proven=False)
    write_plan(replace(lost, objective_value=(math.inf, 2.0)), path)
    assert load_plan(path).objective_value == (math.inf, 2.0)


def test_a_model_that_breaks_the_goal_beside_one_that_keeps_it_is_in_the_file() -> None:
    """A plan of two models has rooms for all servers or for none: those of one model alone could not be written."""
    names = "llama-3.1-8b-instruct", "qwen-2.5-7b-instruct"
    fleet = Workload([Adapter("hot", 8, 400.0, model=names[0]), Adapter("b", 8, 0.05, model=names[1])])
    kinds = [load_profile(f"h100-64gb/{name}") for name in names]
    plan = recommend(fleet, kinds, max_replicas=1, verify=False)
    assert (plan.status, plan.rooms, plan.headroom_words) == (Status.INFEASIBLE, (), ["none", "> +300%"])
    assert plan_from_dict(plan_to_dict(plan)).headroom == plan.headroom
