"""Profiles by name and as TOML files. The tables mirror the dataclasses of `packer.profile`."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from pydantic import Field

from packer.errors import FileFormatError, UnknownNameError, ValidationError
from packer.io.documents import parse_toml
from packer.io.files import read_text, write_text
from packer.io.schema import Table, parse
from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile

SCHEMA = 1
"""Version of the file format."""


class ModelTable(Table):
    """`[model]`."""

    name: str
    weights_bytes: float
    kv_bytes_per_token: float
    lora_bytes_per_rank: float


class GpuTable(Table):
    """`[gpu]`."""

    name: str
    memory_bytes: float
    price_per_hour: float | None = None


class EngineTable(Table):
    """`[engine]`."""

    name: str
    version: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_cpu_loras: int | None = None
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1


class MemoryTable(Table):
    """`[memory]`; `measured` is a list of [max_loras, max_lora_rank, tokens]."""

    kv_budget_bytes: float
    slot_bytes: float
    slot_bytes_per_rank: float
    min_kv_tokens: int
    policy: Literal["reserved", "unified"] = "reserved"
    measured: Annotated[
        tuple[Annotated[tuple[int, int, int], Field(strict=False)], ...], Field(strict=False)
    ] = ()


class LatencyTable(Table):
    """`[latency]`."""

    form: Literal["linear", "paper"]
    graph_max_tokens: int = 512
    coefficients: dict[str, float]


class LoadingTable(Table):
    """`[loading]`."""

    host_base_ms: float = 0.0
    host_per_rank_ms: float = 0.0
    disk_base_ms: float = 0.0
    disk_per_rank_ms: float = 0.0
    cold_start: bool = False


class ProfileFile(Table):
    """The whole file."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    calibrated: bool = False
    model: ModelTable
    gpu: GpuTable
    engine: EngineTable
    memory: MemoryTable
    latency: LatencyTable
    loading: LoadingTable = LoadingTable()
    provenance: dict[str, str] = Field(default_factory=dict)
    errors: dict[str, float] = Field(default_factory=dict)

    def profile(self) -> Profile:
        """The profile; its dataclasses check every value."""
        return Profile(
            name=self.name,
            model=ModelSpec(**dict(self.model)),
            gpu=GpuSpec(**dict(self.gpu)),
            engine=EngineSpec(**dict(self.engine)),
            memory=MemorySpec(**dict(self.memory)),
            latency=LatencySpec(**dict(self.latency)),
            loading=LoadingSpec(**dict(self.loading)),
            calibrated=self.calibrated,
            provenance=self.provenance,
            errors=self.errors,
        )


@cache
def _shipped() -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    for gpu in files("packer.twin.profiles").iterdir():
        if gpu.is_dir():
            for entry in gpu.iterdir():
                if entry.name.endswith(".toml"):
                    found[f"{gpu.name}/{entry.name.removesuffix('.toml')}"] = entry
    return dict(sorted(found.items()))


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, "<gpu>/<model>", sorted."""
    return tuple(_shipped())


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """A shipped profile by its name, or the profile in a `.toml` file.

    Raises
    ------
    UnknownNameError
        No shipped profile has that name.
    FileFormatError
        The file can't be read, or a value in it breaks a rule; names the key.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml"):
        return parse_profile(read_text(text), text)
    if text not in _shipped():
        raise UnknownNameError("profile", text, _shipped())
    return _load_shipped(text)


@cache
def _load_shipped(name: str) -> Profile:
    return parse_profile(_shipped()[name].read_text(encoding="utf-8"), f"{name}.toml")


def parse_profile(text: str, path: str | os.PathLike[str]) -> Profile:
    """The profile in a TOML text; `path` is named in errors."""
    return profile_from_dict(parse_toml(text, path), path)


def profile_from_dict(data: Any, path: str | os.PathLike[str]) -> Profile:
    """The profile in nested dicts, as a plan file embeds it; `path` is named in errors."""
    table = parse(ProfileFile, data, path)
    try:
        return table.profile()
    except ValidationError as error:
        raise FileFormatError(str(error), path=path) from None


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Nested dicts in the shape of the file; keys without a value are left out."""
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "name": profile.name,
        "calibrated": profile.calibrated,
        "model": asdict(profile.model),
        "gpu": asdict(profile.gpu),
        "engine": asdict(profile.engine),
        "memory": {**asdict(profile.memory), "measured": [list(point) for point in profile.memory.measured]},
        "latency": {
            "form": profile.latency.form,
            "graph_max_tokens": profile.latency.graph_max_tokens,
            "coefficients": dict(profile.latency.coefficients),
        },
        "loading": asdict(profile.loading),
        "provenance": dict(profile.provenance),
        "errors": dict(profile.errors),
    }
    for key in ("gpu", "engine"):
        data[key] = {name: value for name, value in data[key].items() if value is not None}
    return data


def write_profile(profile: Profile, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a profile as TOML, atomically; an existing file needs `force`."""
    write_text(path, format_profile(profile), force=force)


def format_profile(profile: Profile) -> str:
    """A profile as the text of its TOML file; `parse_profile` gives the same profile back."""
    import tomlkit

    data = profile_to_dict(profile)
    document = tomlkit.document()
    if not profile.calibrated:
        document.add(tomlkit.comment("Estimated from datasheets, not calibrated on a server."))
    measured = tomlkit.array().multiline(multiline=bool(data["memory"]["measured"]))
    for point in data["memory"]["measured"]:
        measured.append(point)
    data["memory"]["measured"] = measured
    for key, value in data.items():
        if value != {} or key == "latency":
            document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document)
