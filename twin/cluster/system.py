"""Systems: the choices that make a cluster "vLLM with round robin" or "S-LoRA", by name or from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from packer.errors import FileFormatError, reader
from packer.io.documents import parse_toml
from packer.io.schema import parse
from packer.io.shipped import read_named, shipped

FOLDER = "packer.twin.cluster.systems"


@dataclass(frozen=True)
class System:
    """How a cluster is run.

    `router`, and all that follows: by name, with parameters as in "affinity:slack=8"; None keeps what the kinds of
    server have. `source`: where the description comes from. `engine`: `packer.engines`. `cache`: a cache policy
    (`packer.twin.cache`). `loading`: `packer.twin.cache.loading`. `kernel`: `packer.twin.law.kernels`.
    `memory`: "reserved" or "unified". `placement`: the solver whose plan places the adapters
    of a cluster that has no placement, or "auto". `tuning`: how training shares the servers
    (`packer.twin.tuning.policies`).
    """

    name: str
    summary: str
    source: str
    router: str
    engine: str | None = None
    cache: str | None = None
    loading: str | None = None
    kernel: str | None = None
    memory: Literal["reserved", "unified"] | None = None
    placement: str | None = None
    tuning: str | None = None


def system_names() -> tuple[str, ...]:
    """Names of the shipped systems, sorted."""
    return tuple(shipped(FOLDER))


@reader
def load_system(name_or_path: str | os.PathLike[str]) -> System:
    """A shipped system by its name, or the one in a `.toml` file.

    Raises `UnknownNameError`: no shipped system has that name; `FileFormatError`: the file can't be read, or a value
    in it breaks a rule; names the key.
    """
    name, content = read_named("system", name_or_path, FOLDER)
    data = parse_toml(content)
    if "name" in data:
        raise FileFormatError("unknown key: the file's own name is the system's.", key="name")
    return parse(System, {"name": name, **data})
