"""From pydantic's complaints to ours: one line with file, key, rule and value."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, TypeVar, get_args, get_origin

import pydantic

from packer.errors import FileFormatError, shown


class Table(pydantic.BaseModel):
    """A table of a file: unknown keys are refused, and no value is converted silently."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


_UNION_MEMBER = re.compile(r"[A-Z]\w*Table$|float$|int$|str$|list\[|dict\[")
T = TypeVar("T", bound=pydantic.BaseModel)


def parse(kind: type[T], data: Any, path: str | os.PathLike[str]) -> T:
    """`data` as a `kind`.

    Raises
    ------
    FileFormatError
        A key is missing, unknown or has a wrong value; names the key, as in `engine.max_num_seqs`.
    """
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as error:
        # A misspelt key is both unknown and missing: what was written says more than what was not.
        found = error.errors(include_url=False, include_context=False)
        first = min(found, key=lambda item: item["type"] != "extra_forbidden")
    # In a union pydantic adds the member's name, which is none of the file's.
    where = ".".join(_part(part) for part in first["loc"] if not _UNION_MEMBER.match(str(part))) or None
    if first["type"] == "extra_forbidden":
        raise FileFormatError(f"unknown key{_known_keys(kind, first['loc'])}", path=path, key=where)
    if first["type"] == "missing":
        raise FileFormatError("this key is missing.", path=path, key=where)
    rule = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    rule = re.sub(r"a valid dictionary or (instance|object).*", "a table", rule)
    raise FileFormatError(f"{rule}, got {shown(first['input'])}.", path=path, key=where)


def _part(part: str | int) -> str:
    text = str(part)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _known_keys(kind: type[pydantic.BaseModel], loc: Iterable[str | int]) -> str:
    """The keys that are known where an unknown one was found, if that table is easy to find."""
    import difflib

    *tables, wrong = loc
    current: Any = kind
    for name in tables:
        if isinstance(name, int):  # the place in a list
            continue
        found = {f.alias or key: f.annotation for key, f in current.model_fields.items()}.get(str(name))
        if get_origin(found) is list:
            (found,) = get_args(found)
        if not (isinstance(found, type) and issubclass(found, pydantic.BaseModel)):
            return "."
        current = found
    known = [f.alias or key for key, f in current.model_fields.items()]
    near = difflib.get_close_matches(str(wrong)[:80], known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}."
