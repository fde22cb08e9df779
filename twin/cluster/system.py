"""Systems: the choices that make a cluster "vLLM with round robin" or "S-LoRA", by name or from a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from packer.errors import UnknownNameError
from packer.io.documents import parse_toml
from packer.io.files import read_text
from packer.io.schema import Table, parse


@dataclass(frozen=True)
class System:
    """How a cluster is run.

    `router`: by name, with parameters as in "affinity:slack=8". `source`: where the description comes from.
    """

    name: str
    summary: str
    source: str
    router: str


class SystemFile(Table):
    """A system's file."""

    summary: str
    source: str
    router: str


@cache
def _shipped() -> dict[str, Traversable]:
    folder = files("packer.twin.cluster.systems")
    found = {e.name.removesuffix(".toml"): e for e in folder.iterdir() if e.name.endswith(".toml")}
    return dict(sorted(found.items()))


def system_names() -> tuple[str, ...]:
    """Names of the shipped systems, sorted."""
    return tuple(_shipped())


def load_system(name_or_path: str | os.PathLike[str]) -> System:
    """A shipped system by its name, or the one in a `.toml` file.

    Raises
    ------
    UnknownNameError
        No shipped system has that name.
    FileFormatError
        The file can't be read, or a value in it breaks a rule; names the key.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml"):
        content, name = read_text(text), os.path.basename(text).removesuffix(".toml")
    elif text in _shipped():
        content, name = _shipped()[text].read_text(encoding="utf-8"), text
    else:
        raise UnknownNameError("system", text, _shipped())
    return System(name, **dict(parse(SystemFile, parse_toml(content, text), text)))
