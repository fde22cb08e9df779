"""Defaults of options from `packer.toml`, or from `[tool.packer]` in `pyproject.toml`, in this folder.

Keys are the options' names (docs/how-to/configure.md). At the top they hold for every command that has such an option;
in a table they hold for the command of that name. A key that no command has as an option, and a table that is not named
after a command, are errors. PACKER_CONFIG names another file; if it is empty, no file is read.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from packer.cli.declare import LazyGroup, Pairs, name_of
from packer.errors import FileFormatError, reading

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
    if not project.is_file():
        return None
    from packer.io.files import read_bytes

    try:
        return project if b"[tool.packer" in read_bytes(project) else None
    except FileFormatError:
        return None


def _read(path: Path) -> Mapping[str, Any]:
    from packer.io.documents import parse_toml
    from packer.io.files import read_text

    empty = path.is_file() and path.stat().st_size == 0
    data: Any = {} if empty else parse_toml(read_text(path))
    if path.name == "pyproject.toml":
        tool = data.get("tool", {})
        data = tool.get("packer", {}) if isinstance(tool, dict) else tool
        if not isinstance(data, dict):
            raise FileFormatError("expected tool.packer to be a table.")
    return dict(data)


def defaults_for(command: click.Command, words: tuple[str, ...]) -> dict[str, Any]:
    """The file's defaults for a command. `words`: the names of its groups, then its own name.

    A group has no defaults: each of its commands gets its own when it is imported.

    Raises `FileFormatError`: the file is damaged, a key in the command's own table is not an option of the command, a
    key at the top is not an option of any command, or a table is not named after a command.
    """
    path = None if isinstance(command, click.Group) else config_path()
    if path is None:
        return {}
    from packer.cli import cli

    known = option_names(command)
    params = {each.name: each for each in every_option(command)}
    found: dict[str, Any] = {}
    with reading(path):
        for place, value in sorted(_leaves(cli, _read(path)), key=lambda leaf: len(leaf[0])):
            *table, key = place
            if tuple(table) == words and key not in known:
                raise _wrong(place, f"packer {' '.join(words)} has no option --{key[:80]}.", known)
            if not table and key not in known and key not in _all_options():
                raise _wrong(place, f"no command has an option --{key[:80]}.", _all_options())
            if key in known and tuple(table) in ((), words):  # the command's own table comes last
                param, value = params[known[key]], _default(params[known[key]], value, place)
                if isinstance(param, Pairs):
                    named = [f"{key}={','.join(value)}"] if key in param.names else value
                    own = {name_of(each) for each in named}
                    value = [*(each for each in found.get(known[key], ()) if name_of(each) not in own), *named]
                found[known[key]] = value
    return found


def _leaves(
    group: LazyGroup, data: Mapping[str, Any], words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each key's path and value. Raises `FileFormatError` if a table is not named after a command."""
    for key, value in data.items():
        place = (*words, key)
        child = group.load(key) if key in group.lazy else None
        if isinstance(value, Mapping) and isinstance(child, LazyGroup):
            yield from _leaves(child, value, place)
        elif isinstance(value, Mapping) and child is not None:
            yield from (((*place, name), each) for name, each in value.items())
        elif child is not None:
            raise _wrong(place, "expected a table: it is named after a command.")
        elif words or isinstance(value, Mapping):
            name = " ".join(("packer", *words))
            raise _wrong(place, f"{name} has no command {key[:80]!r}.", group.lazy)
        else:
            yield place, value


def _default(option: click.Option, value: Any, place: tuple[str, ...]) -> Any:
    """Convert a value of the file to text, as on the command line, so that the option's type checks it."""
    several = value if isinstance(value, list) else [value]
    if option.is_flag and isinstance(value, bool):
        return value
    if option.is_flag or not all(isinstance(v, (str, int, float)) and not isinstance(v, bool) for v in several):
        expected = "true or false" if option.is_flag else "text, a number or a list of them"
        raise _wrong(place, f"expected {expected}, got {str(value)[:80]!r}.")
    texts = [str(each) for each in several]
    return texts if option.multiple else ",".join(texts)


@cache
def _all_options() -> Mapping[str, str]:
    """The options of all commands. Imports every command."""
    from packer.cli import cli

    return option_names(cli)


def _wrong(words: Sequence[str], rule: str, known: Collection[str] = ()) -> FileFormatError:
    """Error for a key, which suggests the most similar of the known names if there is one."""
    near = difflib.get_close_matches(words[-1], known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return FileFormatError(f"{rule}{hint}", key=".".join(words)[:120])


def option_names(command: click.Command) -> dict[str, str]:
    """Name of an option, without dashes → parameter of the command. A group has the options of all its commands."""
    if isinstance(command, LazyGroup):
        return {key: each for name in command.lazy for key, each in option_names(command.load(name)).items()}
    return {
        text[2:]: each.name or ""
        for each in every_option(command)
        for text in (*each.opts, *(f"--{name}" for name in getattr(each, "names", ())))
        if text.startswith("--")
    }


def every_option(command: click.Command) -> list[click.Option]:
    """The options of a command except `--help`."""
    declared = (*command.params, *getattr(command, "everywhere", ()))
    return [each for each in declared if isinstance(each, click.Option)]
