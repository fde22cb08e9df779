"""The inputs of a project: the profile of a model on a GPU, and the fleet of a log or a file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from packer import checks
from packer.errors import IncompatibleError
from packer.fit.estimate import estimate_profile
from packer.fit.models import MODELS, model_named
from packer.gpu import base_model
from packer.io.profiles import load_profile, profile_names
from packer.io.recognise import kind_of
from packer.io.workloads import LOGS, read_workload
from packer.operate.observe import observe_log
from packer.operate.view import AS_LOGGED, BUSIEST, Named, Observed, View
from packer.profile import Profile
from packer.traces.access_log import USUAL, Fields
from packer.traces.assign import Ranks
from packer.traces.read import read_trace
from packer.twin.datasheets import GPUS, datasheet
from packer.twin.memory.starts import MORE_GPUS, check_starts, what_starts
from packer.twin.override import with_engine
from packer.words import counted, listed
from packer.workload import Workload

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)  # GPUs per server to try by default; the first with which it starts is used.
RULES = (
    "block_size", "prefix_caching", "async_scheduling", "max_num_queued_reqs", "scheduling_policy", "speculation",
    "warm_start",
)  # fmt: skip
"""Settings that an estimate does not depend on."""


USUAL_RANK = 8  # Rank of the slot with which a server must start if the fleet is not known, or has no adapters.


def profile_for(model: str, gpu: str, settings: Mapping[str, Any], rank: int = 0) -> Profile:
    """The calibrated profile of a model on a GPU if one is shipped, else an estimate.

    `model`, `gpu`: as `packer.estimate_profile` takes them.
    `settings`: settings of `with_engine` that differ from the defaults; also `quantization`, `data_parallel_size` and
    `tensor_parallel_size`. Without the last, the smallest one with which the server starts is used, and the provenance
    says with which settings fewer GPUs would start.
    `rank`: largest rank of the fleet's adapters: the server starts with a slot of it. 0: of `USUAL_RANK`.
    Raises `UnknownNameError`: the model or the GPU is not known; `IncompatibleError`: the model does not fit the GPU,
    or not with its whole context.
    """
    slot_rank = checks.slot_rank_for(rank or USUAL_RANK)
    if settings.get("tensor_parallel_size") is not None:
        given = _profile(model, gpu, settings)
        try:
            check_starts(given, slot_rank)
        except IncompatibleError as error:
            if not (more := _more_gpus(model, gpu, settings, rank)):
                raise
            raise IncompatibleError(f"{error}"[:-1].replace(MORE_GPUS, "") + f"{more}.") from None
        return given
    refused: IncompatibleError | None = None
    fewer = ""
    for size in TENSOR_PARALLEL_SIZES:
        found = None
        try:
            found = _profile(model, gpu, {**settings, "tensor_parallel_size": size})
            check_starts(found, slot_rank)
        except IncompatibleError as error:
            # A size that the model cannot have does not hide why another size does not start.
            if refused is None or found is not None:
                refused = error
            ways = None if found is None else what_starts(found, found.settings(1, slot_rank))
            if ways is not None and ways.startswith("--"):
                fewer = fewer or f"with {counted(size, 'GPU')} it starts at {ways}"
        else:
            return replace(found, provenance={**found.provenance, "fewer GPUs": fewer}) if fewer else found
    assert refused is not None
    raise refused


def _more_gpus(model: str, gpu: str, settings: Mapping[str, Any], rank: int) -> str:
    """Return " or " and the smallest tensor-parallel size with which the server starts; "" if none does."""
    try:
        found = profile_for(model, gpu, {**settings, "tensor_parallel_size": None}, rank)
    except IncompatibleError:
        return ""
    return f" or --tensor-parallel-size {found.engine.tensor_parallel_size}"


def profiles_for(
    model: str, gpu: str, sizes: Mapping[str, Sequence[int]], settings: Mapping[str, Any], rank: int = 0
) -> list[Profile]:
    """Profiles of servers of several sizes, for a plan to choose from. Servers that do not start are left out, and the
    provenance of the first profile says why.

    `sizes`: values of `tensor_parallel_size` and `data_parallel_size`; all combinations are made. `rank`: as
    for `profile_for`, whose errors are raised if no server starts.
    """
    found, refused = [], []
    for values in product(*(dict.fromkeys(each) for each in sizes.values())):
        try:
            found.append(profile_for(model, gpu, {**settings, **dict(zip(sizes, values, strict=True))}, rank))
        except IncompatibleError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    if refused:
        why = " ".join(dict.fromkeys(map(str, refused)))
        found[0] = replace(found[0], provenance={**found[0].provenance, "left out": why})
    return found


def _profile(model: str, gpu: str, settings: Mapping[str, Any]) -> Profile:
    sheet, dimensions = datasheet(gpu), model_named(model)
    own = {name: value for name, value in settings.items() if value is not None}
    hardware = {"tensor_parallel_size": 1, "data_parallel_size": 1, "quantization": ""}
    plain = all((own.get(name) or usual) == usual for name, usual in hardware.items())
    known = sheet in GPUS.values() and dimensions in MODELS.values()
    for name in profile_names() if plain and known else ():
        shipped = load_profile(name)
        if name.partition("/")[0] == sheet.name and shipped.model.repository == dimensions.repository:
            return with_engine(shipped, **{key: own[key] for key in own if key not in hardware})
    rules = {key: own.pop(key) for key in RULES if key in own}
    return with_engine(estimate_profile(dimensions, gpu, version=own.pop("vllm_version", None), **own), **rules)


def is_log(path: str | os.PathLike[str], *, assumed: bool = False) -> bool:
    """Whether a file is a log of requests, by its content, by its ending, or because that is `assumed`."""
    ending = os.fspath(path).lower().removesuffix(".gz").endswith(LOGS)
    return kind_of(path) == "log of requests" or ((ending or assumed) and kind_of(path) is None)


def fleet_for(
    path: str | os.PathLike[str], ranks: Ranks, *, view: View = BUSIEST, fields: Fields = USUAL,
    named: Named = AS_LOGGED, base: Collection[str] = (),
) -> tuple[Workload, Observed | None]:  # fmt: skip
    """The fleet of a log of requests or of a workload file, and for a log what was observed.

    `base`: names of the base model, with any owner and case: its requests in a log have no adapter.

    Raises `FileFormatError`: the file is neither, or the log has no request of an adapter; `IncompatibleError`: ranks
    were given with a workload file, which has its own.
    """
    if is_log(path, assumed=fields != USUAL or bool(ranks.table or ranks.others)):
        log = read_trace(path, fields)
        given = named.adapters is not None or (log.ranks is not None and not (ranks.table or ranks.others))
        own = set() if given else {base_model(each) for each in base}
        plain = [name for name in log.names if base_model(name) in own and name not in ranks.table]
        ranks = replace(ranks, table={**ranks.table, **dict.fromkeys(plain, 0)})
        found = observe_log(log, ranks, view, named=named)
        if plain:
            said = f"requests to {listed(plain)} have no adapter: they are planned for, too; --skip leaves them out"
            found = replace(found, notes=(said, *found.notes))
        return found.fleet, found
    fleet = read_workload(path)
    if ranks.table or ranks.others:
        raise IncompatibleError(f"{os.fspath(path)} is a workload file and has ranks: leave out --ranks and --rank.")
    return fleet, None
