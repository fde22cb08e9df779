"""Where adapters lie: a table name → path or repository, from CSV, JSON or YAML; and what vLLM reads."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer.errors import FileFormatError, IncompatibleError, shown

_COLUMNS = ("adapter", "source")


def read_sources(path: str | os.PathLike[str]) -> dict[str, str]:
    """The table of a file: a CSV with the columns `adapter,source`, or a JSON or YAML mapping.

    Raises
    ------
    FileFormatError
        It is not such a table; a name stands twice; a source is empty or holds control characters.
    """
    from packer.io.files import read_text

    suffix = Path(path).suffix.lower()
    text = read_text(path)
    if suffix == ".csv":
        return _from_csv(text, path)
    if suffix == ".json":
        return _checked(_parse_json(text, path), path)
    if suffix in (".yaml", ".yml"):
        return _checked(_parse_yaml(text, path), path)
    raise FileFormatError("expected adapter sources in a .csv, .json, .yaml or .yml file.", path=path)


def _from_csv(text: str, path: str | os.PathLike[str]) -> dict[str, str]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    table: dict[str, str] = {}
    try:
        header = next(reader)
        if tuple(name.strip() for name in header) != _COLUMNS:
            raise FileFormatError(
                f"expected the columns {', '.join(_COLUMNS)}, got {shown(', '.join(header))}.",
                path=path,
                row=1,
            )
        for cells in reader:
            row = reader.line_num
            if not cells:
                continue
            if len(cells) != len(_COLUMNS):
                raise FileFormatError(f"expected 2 cells, got {len(cells)}.", path=path, row=row)
            name, source = cells
            if name in table:
                raise FileFormatError(f"the adapter {shown(name)} stands here twice.", path=path, row=row)
            table[name] = _source(name, source, path, row)
    except csv.Error as error:
        raise FileFormatError(f"not a CSV file: {error}.", path=path, row=reader.line_num) from None
    return table


def _parse_json(text: str, path: str | os.PathLike[str]) -> object:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise FileFormatError("expected each adapter once, one stands here twice.", path=path)
        return table

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise FileFormatError(f"not JSON: {error.msg}.", path=path, row=error.lineno) from None
    except (RecursionError, ValueError) as error:
        raise FileFormatError(f"not JSON of this kind: {error}.", path=path) from None


def _parse_yaml(text: str, path: str | os.PathLike[str]) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that stands twice, which YAML's own loader lets pass."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            try:
                table: dict[Any, Any] = super().construct_mapping(node, deep)
            except TypeError as error:
                raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None
            if len(table) != len(node.value):
                line = node.start_mark.line + 1
                raise FileFormatError(
                    "expected each adapter once, one stands here twice.", path=path, row=line
                )
            return table

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        row = error.problem_mark.line + 1 if error.problem_mark else None
        raise FileFormatError(f"not YAML: {error.problem or error}.", path=path, row=row) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise FileFormatError(f"not YAML: {str(error).splitlines()[0]}.", path=path) from None


def _checked(table: object, path: str | os.PathLike[str]) -> dict[str, str]:
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise FileFormatError("expected a mapping from adapter names to paths or repositories.", path=path)
    return {name: _source(name, source, path, None) for name, source in table.items()}


def _source(name: str, source: object, path: str | os.PathLike[str], row: int | None) -> str:
    if not isinstance(source, str) or not source.strip() or not source.isprintable():
        raise FileFormatError(
            f"expected the source of adapter {shown(name)} to be a path or repository, got {shown(source)}.",
            path=path,
            row=row,
        )
    return source.strip()


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)
_KINDS = {
    "file": "path",
    "hf": "huggingface",
    "huggingface": "huggingface",
    "s3": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "tos": "tos",
    "http": "http",
    "https": "http",
}
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_ELSEWHERE = {
    "s3": ", or use --format aibrix or --format helm",
    "gcs": ", or use --format aibrix",
    "tos": ", or use --format aibrix",
    "http": ", or use --format helm",
}
"""Formats that read what others can't."""


def kind_of(source: str) -> str:
    """What a source is: "path", "huggingface", "s3", "gcs", "tos", "http"; "unknown": no format reads it."""
    address = _SCHEME.fullmatch(source)
    if address:
        scheme, rest = address[1].lower(), address[2]
        complete = rest.startswith("/") if scheme == "file" else bool(rest)
        return _KINDS.get(scheme, "unknown") if complete else "unknown"
    parts = source.split("/")
    is_repository = len(parts) == 2 and all(parts) and not source.startswith((".", "~", "/"))
    return "huggingface" if is_repository else "path"


def without_scheme(source: str) -> str:
    """What follows `file://`, `hf://`, `s3://`, …; a source without a scheme as it is."""
    address = _SCHEME.fullmatch(source)
    return address[2] if address else source


def vllm_path(name: str, source: str) -> str:
    """A source as vLLM's --lora-modules takes it: a path on the server, or a Hugging Face repository's id.

    vLLM takes what is neither an absolute path nor a file that is there for a repository's id
    (vllm/lora/utils.py, get_adapter_absolute_path), so an address of another scheme would fail only when the
    server starts.

    Raises
    ------
    IncompatibleError
        It is neither.
    """
    kind, rest = kind_of(source), without_scheme(source)
    if kind == "path" or (kind == "huggingface" and (rest == source or _REPOSITORY.fullmatch(rest))):
        return rest
    raise refused(name, source, "a path on the server or a Hugging Face repository (vLLM reads nothing else)")


def refused(name: str, source: str, expected: str) -> IncompatibleError:
    """The error for an adapter whose source a format can't read, with what would help."""
    return IncompatibleError(
        f"Expected the source of adapter {shown(name)} to be {expected}, got {shown(source)}. Give a path "
        f"on the servers or the id of a repository{_ELSEWHERE.get(kind_of(source), '')}."
    )
