"""JSON, YAML and TOML texts as nested lists and dicts: keys are unique, nesting and types are bounded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

from packer.errors import FileFormatError, shown
from packer.io.tables import first_line

MAX_DEPTH = 64  # Largest nesting depth of lists and objects; packer's own files have fewer than ten levels.


def parse_json(text: str, *, row: int | None = None) -> Any:
    """The data in a JSON text.

    `row`: its line in a log, in which NaN and infinities, which some programs write, become null.
    Raises `FileFormatError`: the text is not JSON, repeats a key in an object, has a number that is not finite and no
    `row`, or is nested too deeply.
    """
    try:
        data = (_DECODER if row is None else _LINE_DECODER).decode(text)
    except json.JSONDecodeError as error:
        where = f"{error.msg} (character {error.colno} of the row)"
        raise FileFormatError(f"expected JSON: {where}.", row=(row or 1) + error.lineno - 1) from None
    except RecursionError:
        raise FileFormatError(_too_deep("JSON"), row=row) from None
    except ValueError as error:
        raise FileFormatError(f"expected JSON: {first_line(error)}.", row=row) from None
    return data if text.count("{") + text.count("[") <= MAX_DEPTH else _bounded(data, "JSON", row)


def jsonable(value: Any) -> Any:
    """The same data in JSON's types: arrays become lists; NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    return str(value)


def json_lines(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row number and object of each line of a JSON Lines text, or of one list of objects. Raises as `parse_json`."""
    if re.match(r"\s*(\[|\{[ \t\r]*\n)", text):
        try:
            data = parse_json(text, row=1)
        except FileFormatError as error:
            if "Extra data" in str(error):
                rule = "expected one JSON list or object, got several"
                each = ".[]" if text.lstrip().startswith("[") else "."
                error.args = (f"{rule}: jq -c {each} FILE writes a line of each request.",)
            raise
        found = data if isinstance(data, list) else _objects(data) or [data]
        entries: Iterable[tuple[int, Any]] = enumerate(found, start=1)
    else:
        lines = enumerate(text.split("\n"), start=1)
        entries = ((row, parse_json(line, row=row)) for row, line in lines if line.strip())
    for row, data in entries:
        if not isinstance(data, dict):
            raise FileFormatError(f"expected a JSON object in each line or entry, got {shown(data)}.", row=row)
        yield row, data


def _objects(data: Any) -> list[Any]:
    """The first list of objects in a list or object; [] if it has none."""
    if isinstance(data, list):
        return data if data and isinstance(data[0], dict) else []
    inside = (_objects(each) for each in data.values() if isinstance(each, (dict, list)))
    return next(filter(None, inside), [])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError(_twice([key for key, _ in pairs]))
    return data


def _twice(keys: list[Any]) -> str:
    twice = next(key for key in keys if keys.count(key) > 1)
    return f"the key {str(twice)[:80]!r} appears twice in one object"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected a finite number, got {name}")


# Decoders are made once: a log has many lines.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
_LINE_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=lambda _: None)


def _too_deep(language: str) -> str:
    return f"expected {language}: at most {MAX_DEPTH} lists and objects inside one another, got more."


def _bounded(data: Any, language: str, row: int | None = None) -> Any:
    """Return `data`; raise if it is nested deeper than `MAX_DEPTH`."""
    level: list[Any] = [[data]]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return data
    raise FileFormatError(_too_deep(language), row=row)


_LONG_KEY = re.compile(rf"(?<![-\w])(?:(?:[-\w]++|\"[^\"\n]*+\"|'[^'\n]*+')[ \t]*+\.[ \t]*+){{{MAX_DEPTH}}}")
"""A dotted key with more parts than `MAX_DEPTH`."""


def parse_toml(text: str) -> dict[str, Any]:
    """The data in a TOML text; raises `FileFormatError` if it is no TOML, or nested too deeply."""
    import tomllib

    if _LONG_KEY.search(text):  # tomllib's time grows with the square of a key's parts
        raise FileFormatError(_too_deep("TOML"))
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise FileFormatError(_too_deep("TOML")) from None
    except ValueError as error:
        raise FileFormatError(f"expected TOML: {first_line(error)}.") from None
    checked: dict[str, Any] = _bounded(data, "TOML")
    return checked


def toml_table(data: dict[str, Any]) -> dict[str, Any]:
    """A table in TOML's types and order: None is left out, tuples become lists, tables follow the other keys."""
    given = {key: value for key, value in data.items() if value is not None}
    plain = {key: _listed(value) for key, value in given.items() if not isinstance(value, dict)}
    return {**plain, **{key: toml_table(value) for key, value in given.items() if isinstance(value, dict)}}


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def parse_yaml(text: str) -> Any:
    """The data in a YAML text, read by the core schema of YAML 1.2 without octal and hexadecimal numbers.

    Values that YAML 1.1 and 1.2 read differently (`on`, `010`, `1:30`, `2024-05-01`) stay text. Tags are refused, and
    so are aliases, because a few of them can expand to gigabytes.

    Raises `FileFormatError`: the text is not YAML, repeats a key in an object, has an alias or tag, or is too deep.
    """
    import yaml

    loader = _yaml_loader()
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            row = _row(event.start_mark)
            if isinstance(event, yaml.AliasEvent):
                message = f"YAML aliases (*{str(event.anchor)[:80]}) are not read: write the value out."
                raise FileFormatError(message, row=row)
            tag = getattr(event, "tag", None)
            if tag is not None:
                raise FileFormatError(f"expected YAML without tags, got {tag[:80]!r}.", row=row)
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise FileFormatError(_too_deep("YAML"), row=row)
        return yaml.load(text, Loader=loader)
    except FileFormatError:
        raise
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or first_line(error)
        where = _row(getattr(error, "problem_mark", None))
        raise FileFormatError(f"expected YAML: {str(problem)[:200]}.", row=where) from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"expected YAML: {first_line(error)}.") from None


def yaml_text(data: Any) -> str:
    """Data as YAML that `parse_yaml` gives back; text that YAML 1.1 takes for another type is quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    return yaml.dump(data, Dumper=_resolving(Dumper), sort_keys=False, allow_unicode=True)


@cache
def _yaml_loader() -> Any:
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            data: dict[Any, Any] = super().construct_mapping(node, deep)
            if len(data) < len(node.value):
                keys = [self.construct_object(key) for key, _ in node.value]
                raise yaml.constructor.ConstructorError(None, None, _twice(keys), node.start_mark)
            return data

    return _resolving(Loader)


def _resolving(reader: Any) -> Any:
    """Add the types of plain values that `parse_yaml` knows to a loader or dumper, and return it."""
    for name, pattern, first in (
        ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
        ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
        ("int", r"[-+]?(?:0|[1-9][0-9]*)", list("-+0123456789")),
        ("float", r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+|0|[1-9][0-9]*)(?:[eE][-+]?[0-9]+)?",
         list("-+.0123456789")),
    ):  # fmt: skip
        reader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), first)
    return reader


def _row(mark: Any) -> int | None:
    return None if mark is None else int(mark.line) + 1
