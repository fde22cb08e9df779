"""Plans as JSON files, which include workload and profiles, so that a file suffices to evaluate, export or compare."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from packer.arrays import BoolArray
from packer.bin import Bin
from packer.errors import FileFormatError, located, reader
from packer.evaluation import FIGURES, FLAGS, WHOLE_GOAL, AdapterFigures, Evaluation, Evaluations
from packer.io.documents import jsonable, parse_json
from packer.io.files import read_text, write_text
from packer.io.plan_checks import content, disagreements
from packer.io.profiles import profile_from_dict, profile_to_dict
from packer.io.schema import FileTable, check_version, parse
from packer.io.workload_schema import workload_from_dict, workload_to_dict
from packer.placement import check_placement
from packer.plan import Moves, Plan, Status
from packer.profile import Profile, labelled
from packer.room import Room

SCHEMA = 2  # Version of the file format.
AGAIN = "if the plan was changed on purpose: packer evaluate PLAN --rewrite"


class GpuTable(FileTable):
    """One server; `shares` is present only if an adapter is split over several servers."""

    gpu: int
    profile: str
    max_loras: int
    max_lora_rank: int
    adapters: list[str]
    shares: list[float] = Field(default_factory=list)
    evaluation: dict[str, float | bool | None] | None = None
    room: dict[str, Any] | None = None


class MovesTable(FileTable):
    """Names of the adapters that move, and for each server of the plan the running server that it continues."""

    adapters: list[str]
    servers: list[int | None]


class PointTable(FileTable):
    """A number of GPUs with its figures; null stands for NaN."""

    n_gpus: int
    p95_ttft_ms: float | None = None
    worst_adapter: str | None = None
    worst_adapter_ttft_ms: float | None = None
    mean_itl_ms: float | None = None
    slo_attainment: float | None = None
    goodput_tok_s: float | None = None
    price_per_hour: float | None = None
    holds: bool
    broken_later: bool = False
    starving: list[int] = Field(default_factory=list)
    queueing: list[int] = Field(default_factory=list)


class OptionTable(FileTable):
    """GPUs and price with one kind of server, or a mix of kinds."""

    model: str | None = None
    kinds: str
    gpus: int
    price_per_hour: float | None = None
    holds: bool
    chosen: bool = False


class EndTable(FileTable):
    """The answer at one end of an estimate's band."""

    capacity: float
    gpus: int | None = None
    objective_value: float | None = None


class BandTable(FileTable):
    """How the error of estimated profiles changes the answer."""

    most: EndTable
    fewest: EndTable


class WithinTable(FileTable):
    """An objective that keeps the goal, and its GPUs."""

    objective: str
    gpus: int


class DetailsTable(FileTable):
    """What a plan says, and any number of statistics of its solver."""

    model_config = ConfigDict(extra="allow")

    decision: str = ""
    frontier: list[PointTable] = Field(default_factory=list)
    kinds: list[OptionTable] = Field(default_factory=list)
    estimate_band: BandTable | None = None
    within_goal: WithinTable | None = None
    limits: dict[str, float] = Field(default_factory=dict)
    evaluated: bool = False
    duration_s: float | None = None


class PlainFields(FileTable):
    """Fields of a plan that the file contains unchanged, with tuples as lists."""

    objective: str = Field(pattern=r"\S")
    solver: str = Field(pattern=r"\S")
    predictor: str = Field(pattern=r"\S")
    objective_value: list[float | None]  # None stands for infinity, as the latency of a server that does not start.
    lower_bound: float | None = None
    bound_proven: bool = False
    bound_source: str = ""
    margin: float | None = None
    headroom: list[float | None] = Field(default_factory=list)
    interrupted: bool = False
    time_limit_reached: bool = False
    reasons: list[str] = Field(default_factory=list)
    verified: bool | None = None
    runtime_s: float = 0.0
    seed: int = 0
    versions: dict[str, str] = Field(default_factory=dict)


PLAIN = tuple(PlainFields.model_fields)
OLDER = {"slo", "queue", "starvation"}  # Factors of a room in files that older versions wrote.


class PlanFile(PlainFields):
    """The whole file, without the version of its format."""

    status: Literal["optimal", "feasible", "infeasible"]
    found_in_time: bool = True
    n_gpus: int
    gap: float | None = None
    adapters: dict[str, list[float | None]] | None = None
    moves: MovesTable | None = None
    unplaced: list[str] = Field(default_factory=list)
    content: str
    gpus: list[GpuTable]
    profiles: dict[str, Any]
    workload: Any
    details: DetailsTable = Field(default_factory=DetailsTable)
    energy: dict[str, Any] | None = None
    prefixes: dict[str, Any] | None = None
    """`energy` and `prefixes` are written by `--json` and ignored when a plan is read."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan in the shape of its file: JSON-able, NaN as None."""
    labels = labelled(item.profile for item in plan.bins)
    names, figures, moves = plan.workload.names, plan.adapters, plan.moves
    gpus = [
        {
            "gpu": k,
            "profile": labels[item.profile],
            "max_loras": item.max_loras,
            "max_lora_rank": item.max_lora_rank,
            "adapters": [names[i] for i in item.adapters],
            **({"shares": item.shares} if item.is_split else {}),
            "evaluation": {name: getattr(row, name) for name in FIGURES},
            **({"room": asdict(plan.rooms[k])} if plan.rooms else {}),
        }
        for k, (item, row) in enumerate(zip(plan.bins, plan.evaluations, strict=True))
    ]
    data = {
        "schema": SCHEMA,
        "status": plan.status.value,
        "found_in_time": plan.found_in_time,
        "n_gpus": plan.n_gpus,
        **{name: getattr(plan, name) for name in PLAIN},
        "details": plan.details,
        "gap": plan.gap,
        "adapters": figures and {name: column.tolist() for name, column in figures._asdict().items()},
        "moves": moves and {"adapters": [names[i] for i in moves.adapters], "servers": moves.servers},
        "unplaced": [names[i] for i in plan.unplaced],
        "content": content(plan),
        "gpus": gpus,
    }
    profiles = {label: profile_to_dict(profile) for profile, label in labels.items()}
    return {**jsonable(data), "profiles": profiles, "workload": workload_to_dict(plan.workload)}


def plan_text(plan: Plan) -> str:
    """A plan as the text of its file."""
    return json.dumps(plan_to_dict(plan), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_plan(plan: Plan, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a plan as JSON, atomically; an existing file needs `force`."""
    write_text(path, plan_text(plan), force=force)


@reader
def load_plan(path: str | os.PathLike[str], *, changed: bool = False) -> Plan:
    """The plan in a file that `write_plan` wrote.

    `path`: the file.
    `changed`: the placement was edited since: read it without its headroom, figures of adapters and moves, and without
    checking that the other figures belong to it. Evaluate such a plan (`packer.operate.evaluate.evaluate_plan`) before
    using it.

    Raises `FileFormatError`: the file can't be read, is damaged, is not a plan or contradicts itself; names the key.
    """
    data = parse_json(read_text(path))
    if not isinstance(data, dict) or "gpus" not in data:
        raise FileFormatError("expected a plan (an object with a list 'gpus').")
    return plan_from_dict(data, changed=changed)


def plan_from_dict(data: Any, *, changed: bool = False) -> Plan:
    """The plan in nested dicts. `changed`: see `load_plan`."""
    file = parse(PlanFile, check_version(data, SCHEMA))
    if changed:  # these may have other lengths than the servers and the workload have now
        file = file.model_copy(update={"adapters": None, "moves": None, "headroom": []})
    workload = workload_from_dict(file.workload)
    profiles = {label: profile_from_dict(each) for label, each in file.profiles.items()}
    number = {name: i for i, name in enumerate(workload.names)}
    bins = tuple(_bin(k, gpu, number, profiles) for k, gpu in enumerate(file.gpus))
    unplaced = _numbers(file.unplaced, number, "unplaced")
    with located("gpus"):
        check_placement(workload, bins, unplaced)
    rooms = [] if changed else [gpu.room or {} for gpu in file.gpus]
    moves = None
    if file.moves is not None:
        moves = Moves(_numbers(file.moves.adapters, number, "moves.adapters"), tuple(file.moves.servers))
    plain: dict[str, Any] = {key: tuple(own) if isinstance(own := getattr(file, key), list) else own for key in PLAIN}
    told = file.details
    own = {name: most for name, most in told.limits.items() if name in FIGURES}
    plain["objective_value"] = tuple(math.inf if each is None else each for each in file.objective_value)
    plan = Plan(
        workload=workload,
        bins=bins,
        evaluations=Evaluations.of([_evaluation(k, gpu, changed) for k, gpu in enumerate(file.gpus)]),
        status=Status(file.status),
        rooms=tuple(_room(k, each) for k, each in enumerate(rooms) if any(rooms)),
        adapters=_adapters(file, np.isin(np.arange(len(workload)), unplaced)),
        moves=moves,
        unplaced=unplaced,
        decision=told.decision,
        frontier=tuple(row.model_dump() for row in told.frontier),
        kinds=tuple(row.model_dump() for row in told.kinds),
        estimate_band=told.estimate_band.model_dump() if told.estimate_band else {},
        within_goal=told.within_goal.model_dump() if told.within_goal else {},
        limits=WHOLE_GOAL if file.objective == "recommend" else own,
        evaluated_s=(told.duration_s or 0.0) if told.evaluated else None,
        statistics=told.model_extra or {},
        **plain,
    )
    for key, fault in () if changed else chain(disagreements(plan), _derived(plan, file)):
        raise FileFormatError(f"{fault}; {AGAIN}", key=key)
    return plan


def _room(k: int, room: dict[str, Any]) -> Room:
    """The room of a server. Older files have three factors: their smallest is its headroom, none if it lacks one."""
    if room.keys() >= OLDER:
        known = [room[key] for key in OLDER if isinstance(room[key], int | float)]
        least = min(known) if len(known) == len(OLDER) else None
        room = {"headroom": least} | {key: room[key] for key in room.keys() - OLDER}
    return parse(Room, room, f"gpus.{k}.room")


def _derived(plan: Plan, file: PlanFile) -> Iterator[tuple[str, str]]:
    """Contradictions between values in the file that derive from others, and the plan."""
    if file.content != content(plan):
        yield "content", "the servers or the workload are not those that were evaluated"
    if file.n_gpus != plan.n_gpus:
        yield "n_gpus", f"expected {plan.n_gpus}, as many as there are, got {file.n_gpus}"
    for k, gpu in enumerate(file.gpus):
        if gpu.gpu != k:
            yield f"gpus.{k}.gpu", f"expected {k}, its place in the list, got {gpu.gpu}"
    if file.headroom and tuple(file.headroom) != plan.headroom:
        yield "headroom", "expected the factors that the servers have as their room"
    if (file.gap is None) != (plan.gap is None) or abs((file.gap or 0.0) - (plan.gap or 0.0)) > 1e-6:
        yield "gap", f"expected {plan.gap}, got {file.gap}"


def _bin(k: int, gpu: GpuTable, number: dict[str, int], profiles: dict[str, Profile]) -> Bin:
    if gpu.profile not in profiles:
        raise FileFormatError(f"there is no profile {gpu.profile!r}.", key=f"gpus.{k}.profile")
    adapters = _numbers(gpu.adapters, number, f"gpus.{k}.adapters")
    profile = profiles[gpu.profile]
    with located(f"gpus.{k}"):
        return Bin(adapters, profile.settings(gpu.max_loras, gpu.max_lora_rank), profile, tuple(gpu.shares))


def _evaluation(k: int, gpu: GpuTable, changed: bool) -> Evaluation:
    """Figures of a server; null becomes NaN. A server that was added by hand (`changed`) may lack all figures. A
    simulated server without a share of its limits starves, queues or does not start: the share is infinite."""
    if gpu.evaluation is None:
        if not changed:
            raise FileFormatError(f"this key is missing; {AGAIN}", key=f"gpus.{k}.evaluation")
        figures: dict[str, Any] = dict.fromkeys(FIGURES, math.nan) | dict.fromkeys(FLAGS, False)
        return Evaluation(**figures)
    figures = {name: math.nan if value is None else value for name, value in gpu.evaluation.items()}
    given = gpu.evaluation.get
    simulated = given("worst_adapter_ttft_ms") is not None or not given("stable", not given("memory_error"))
    if simulated and given("slo_used", 0.0) is None:
        figures["slo_used"] = math.inf
    return parse(Evaluation, figures, f"gpus.{k}.evaluation")


def _adapters(file: PlanFile, unplaced: BoolArray) -> AdapterFigures | None:
    """Figures of each adapter; null becomes NaN. A placed adapter without a share of its limits is on a server that
    starves, queues or does not start: the share is infinite. `unplaced`: bool (n,), whether it has no server."""
    n = len(unplaced)
    if file.adapters is None:
        return None
    columns = {name: np.array(column, dtype=np.float64) for name, column in file.adapters.items()}
    names = AdapterFigures._fields
    if set(columns) != set(names) or any(len(column) != n for column in columns.values()):
        rule = f"expected the columns {', '.join(names)} with an entry for each of {n} adapters."
        raise FileFormatError(rule, key="adapters")
    used = columns["slo_used"]
    return AdapterFigures(**columns | {"slo_used": np.where(np.isnan(used) & ~unplaced, math.inf, used)})


def _numbers(names: Sequence[str], number: dict[str, int], key: str) -> tuple[int, ...]:
    for name in names:
        if name not in number:
            raise FileFormatError(f"the workload has no adapter {name[:80]!r}.", key=key)
    return tuple(number[name] for name in names)
