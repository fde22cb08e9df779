"""Defaults of options from `packer.toml`, or from `[tool.packer]` in `pyproject.toml`, in this folder.

Keys are the options' names. At the top they hold for every command that has such an option; in a table they
hold for the command of that name:

    profile = "h100-64gb/qwen-2.5-7b-instruct"

    [solve]
    time-limit = 60

    [workload.generate]
    ranks = "8,16"

PACKER_CONFIG names another file; if it is empty, no file is read.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import click

VARIABLE = "PACKER_CONFIG"


def config_path() -> Path | None:
    """The file that holds the defaults, if there is one."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return Path(given) if given else None
    own = Path("packer.toml")
    if own.is_file():
        return own
    project = Path("pyproject.toml")
    try:
        return project if b"[tool.packer" in project.read_bytes() else None
    except OSError:
        return None


@cache
def _read(path: Path, _changed: float) -> Mapping[str, Any]:
    import tomllib

    from packer.errors import FileFormatError
    from packer.io.files import read_text

    try:
        empty = path.is_file() and path.stat().st_size == 0
        data: Any = {} if empty else tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise FileFormatError(f"not TOML: {error}.", path=path) from None
    if path.name == "pyproject.toml":
        tool = data.get("tool", {})
        data = tool.get("packer", {}) if isinstance(tool, dict) else tool
        if not isinstance(data, dict):
            raise FileFormatError("expected tool.packer to be a table.", path=path)
    return dict(data)


def config() -> tuple[Path, Mapping[str, Any]] | None:
    """The file and what it says, or None without one."""
    path = config_path()
    if path is None:
        return None
    try:
        changed = path.stat().st_mtime
    except OSError:
        changed = 0.0
    return path, _read(path, changed)


def defaults_for(command: click.Command, words: tuple[str, ...]) -> dict[str, Any]:
    """The file's defaults for a command (`words`: its name, below a group with the group's name first).

    Raises
    ------
    FileFormatError
        The file is damaged, or a key in the command's own table is no option of it.
    """
    found = config()
    if found is None or isinstance(command, click.Group):
        return {}
    from packer.errors import FileFormatError

    path, data = found
    table: Any = data
    for word in words:
        table = table.get(word, {}) if isinstance(table, Mapping) else {}
    if not isinstance(table, Mapping):
        raise FileFormatError("expected a table.", path=path, column=".".join(words))
    known = option_names(command)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise FileFormatError(
                f"packer {' '.join(words)} has no option --{key[:80]}.{hint}",
                path=path,
                column=".".join(words),
            )
    shared = {key: value for key, value in data.items() if key in known and not isinstance(value, Mapping)}
    repeatable = {
        param.name for param in command.params if isinstance(param, click.Option) and param.multiple
    }
    return {
        known[key]: [value] if known[key] in repeatable and not isinstance(value, list) else value
        for key, value in {**shared, **table}.items()
    }


def option_names(command: click.Command) -> dict[str, str]:
    """Option as it is typed, without dashes → parameter of the command."""
    found = {}
    for param in command.params:
        if isinstance(param, click.Option) and param.name:
            for option in param.opts:
                if option.startswith("--"):
                    found[option[2:]] = param.name
    return found
