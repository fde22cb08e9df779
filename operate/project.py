"""What a project starts from: the profile of a model on a GPU, and the fleet of a log or a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from packer.errors import IncompatibleError, UnknownNameError
from packer.fit.estimate import estimate_profile
from packer.fit.models import MODELS, model_named
from packer.io.profiles import load_profile, profile_names
from packer.io.workloads import read_workload
from packer.operate.observe import Observed, View, observe_log
from packer.profile import Profile
from packer.traces.access_log import read_access_log
from packer.traces.ranks import Ranks
from packer.twin.datasheets import GPUS
from packer.twin.memory.policy import kv_cache_tokens
from packer.twin.memory.starts import what_starts
from packer.twin.override import with_engine
from packer.workload import Workload

BUSIEST = View("peak")
LOGS = (".jsonl", ".ndjson", ".log")
"""Endings of access logs, also with .gz."""


def profile_for(model: str, gpu: str, settings: Mapping[str, Any]) -> Profile:
    """The calibrated profile of a model on a GPU if one is shipped, else an estimate.

    `model`: a Hugging Face repository of `packer.fit.models`, or the path of a config.json.
    `gpu`: a name of `packer.twin.datasheets`.
    `settings`: of `with_engine`, where they are not the usual ones.
    Raises `UnknownNameError`: the model or the GPU is not known; `IncompatibleError`: the model does not fit the GPU,
    or not with its whole context.
    """
    found = _profile(model, gpu, settings)
    tokens = kv_cache_tokens(found, found.settings(1, 8))
    if tokens < found.memory.min_kv_tokens:
        raise IncompatibleError(
            f"Beside {found.model.name} and one adapter of rank 8 a {found.gpu.name} holds {tokens:,} tokens of KV "
            f"cache, and vLLM does not start with fewer than max_model_len, {found.engine.max_model_len:,}. What would "
            f"start: {what_starts(found, found.settings(1, 8))}."
        )
    return found


def _profile(model: str, gpu: str, settings: Mapping[str, Any]) -> Profile:
    if gpu not in GPUS:
        raise UnknownNameError("GPU", gpu, GPUS)
    dimensions = model_named(model)
    for name in profile_names() if dimensions in MODELS.values() else ():
        shipped = load_profile(name)
        if name.partition("/")[0] == gpu and shipped.model.repository == dimensions.repository:
            return with_engine(shipped, **settings)
    own = {name: value for name, value in settings.items() if name != "vllm_version"}
    return with_engine(estimate_profile(dimensions, gpu, **own), vllm_version=settings.get("vllm_version"))


def is_log(path: str | os.PathLike[str]) -> bool:
    """Whether a path ends as access logs do."""
    return os.fspath(path).lower().removesuffix(".gz").endswith(LOGS)


def fleet_for(
    path: str | os.PathLike[str],
    ranks: Ranks,
    *,
    view: View = BUSIEST,
    log_options: Mapping[str, Any] | None = None,
) -> tuple[Workload, Observed | None]:
    """The fleet of an access log (by its ending) or of a workload file, and for a log what was observed.

    `view`: which rates of the log the fleet gets.

    Raises `FileFormatError`: the file is neither, or the log has no request of an adapter; `IncompatibleError`: ranks
    were given with a workload file, which has its own.
    """
    if is_log(path):
        found = observe_log(read_access_log(path, **(log_options or {})), ranks, view)
        return found.fleet, found
    if ranks.table or ranks.others:
        raise IncompatibleError(
            f"{os.fspath(path)} is a workload file and has ranks: leave out --ranks and --rank."
        )
    return read_workload(path), None
