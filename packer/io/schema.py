"""Parse tables of files with pydantic, and report errors as one line with file, key, rule and value."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

import pydantic

from packer.errors import FileFormatError, shown


class FileTable(pydantic.BaseModel):
    """A table of a file: unknown keys are refused, and no value is converted silently."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


_UNION_MEMBER = re.compile(r"[A-Z]\w*Table$|float$|int$|str$|list\[|dict\[")
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
T = TypeVar("T")


@cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def parse(kind: type[T], data: Any, key: str = "") -> T:
    """`data` as a `FileTable` or a dataclass of packer, which checks its rules; `key`: position of `data` in the file.
    Raises `FileFormatError`: a key is missing, unknown or has an invalid value; names it, as `engine.max_num_seqs`."""
    try:
        if issubclass(kind, pydantic.BaseModel):
            return kind.model_validate(data)
        # Pydantic's strict mode accepts a list for a tuple and a dict for a dataclass only in JSON.
        text = json.dumps(data, default=str)
        value: T = _adapter(cast("Hashable", kind)).validate_json(text, strict=True, extra="forbid")
        return value
    except pydantic.ValidationError as error:
        # A misspelt key gives two errors, unknown and missing. Report the unknown key, which is in the file.
        found = error.errors(include_url=False, include_context=False)
        first = min(found, key=lambda item: item["type"] not in _UNKNOWN_KEY)
    # For a union, pydantic adds the name of the member to the location; the file has no such key.
    parts = [str(part) for part in first["loc"] if not _UNION_MEMBER.match(str(part))]
    parts = [part if len(part) <= 80 else f"{part[:80]}…" for part in parts]
    where = ".".join([*([key] if key else []), *parts]) or None
    if first["type"] in _UNKNOWN_KEY:
        raise FileFormatError(f"unknown key{_known_keys(kind, first['loc'])}", key=where)
    if first["type"] == "missing":
        raise FileFormatError("this key is missing.", key=where)
    if first["type"] == "value_error":  # raised by packer's constructors; the message has the value received
        raise FileFormatError(first["msg"].removeprefix("Value error, "), key=where)
    rule = first["msg"].replace("Input should be", "expected")
    rule = re.sub(r"\w+ should have (at \w+ \d+) items? after validation.*", r"expected \1 in the list", rule)
    rule = re.sub(r"a valid dictionary( or (instance|object).*)?$|an object$", "a table", rule)
    raise FileFormatError(f"{rule}, got {shown(first['input'])}.", key=where)


def check_version(data: Any, version: int) -> dict[str, Any]:
    """The table without its key `schema`; raises `FileFormatError` unless `schema` is the supported version."""
    if not isinstance(data, dict):
        raise FileFormatError(f"expected a table, got {shown(data)}.")
    if "schema" not in data:
        raise FileFormatError("this key is missing.", key="schema")
    given = data["schema"]
    if given != version or isinstance(given, bool):
        rule = f"expected {version}, got {shown(given)}: the file is of another version of packer; make it again."
        raise FileFormatError(rule, key="schema")
    return {key: value for key, value in data.items() if key != "schema"}


def _known_keys(kind: Any, loc: Iterable[str | int]) -> str:
    """A hint for an unknown key: the nearest or all known keys of its table, if the table can be found."""
    import difflib

    *tables, wrong = loc
    current = _keys(kind)
    for name in tables:
        if isinstance(name, str):  # a number is a place in a list
            current = _keys(current.get(name))
    if not current:
        return "."
    near = difflib.get_close_matches(str(wrong)[:80], current, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(current)}."


def _keys(kind: Any) -> dict[str, Any]:
    """Keys of a table or dataclass (or of the items of a list) with their types; {} for other types."""
    while get_args(kind):
        kind = get_args(kind)[0]
    if not isinstance(kind, type):
        return {}
    if issubclass(kind, pydantic.BaseModel):
        return {item.alias or name: item.annotation for name, item in kind.model_fields.items()}
    return get_type_hints(kind) if is_dataclass(kind) else {}
