"""Sources of adapters: tables name → path or repository from CSV, JSON or YAML, and their syntax in vLLM and others."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from packer.errors import FileFormatError, IncompatibleError, reader, shown
from packer.io.documents import parse_json, parse_yaml
from packer.io.files import read_text
from packer.io.tables import by_adapter, check_columns, csv_rows

_COLUMNS = ("adapter", "source")


@reader
def read_sources(path: str | os.PathLike[str]) -> dict[str, str]:
    """The table of a CSV (`adapter,source`), or of a JSON or YAML mapping; raises `FileFormatError`."""
    suffix = Path(path).suffix.lower()
    text = read_text(path)
    if suffix == ".csv":
        names, rows = csv_rows(text)
        check_columns(names, _COLUMNS, ())
        return {name: _source(name, row.cells["source"], row.number) for name, row in by_adapter(rows)}
    if suffix in (".json", ".yaml", ".yml"):
        table = (parse_json if suffix == ".json" else parse_yaml)(text)
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
            raise FileFormatError("expected a mapping from adapter names to paths or repositories.")
        return {name: _source(name, source, None) for name, source in table.items()}
    raise FileFormatError("expected adapter sources in a .csv, .json, .yaml or .yml file.")


def _source(name: str, source: object, row: int | None) -> str:
    if not isinstance(source, str) or not source.strip() or not source.isprintable():
        rule = f"expected the source of adapter {shown(name)} to be a path or repository"
        raise FileFormatError(f"{rule}, got {shown(source)}.", row=row)
    return source.strip()


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)
_KINDS = {kind: kind for kind in ("huggingface", "s3", "gcs", "tos")}
_KINDS |= {"file": "path", "hf": "huggingface", "gs": "gcs"}
_REPOSITORY = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_ELSEWHERE = {
    "gcs": ", or use --format aibrix or --format ray",
    "tos": ", or use --format aibrix",
    "s3": ", or use --format aibrix, kserve, dynamo or ray",
}
"""Kind of source → formats that read it although others do not, as the end of a message."""


def parsed(source: str) -> tuple[str, str]:
    """Kind of a source, and the source without its scheme (`file://`, `hf://`, `s3://`, …), if it has one. Kinds:
    "path", "huggingface", "s3", "gcs", "tos"; "unknown": no format reads it."""
    if address := _SCHEME.fullmatch(source):
        scheme, rest = address[1].lower(), address[2]
        complete = rest.startswith("/") if scheme == "file" else bool(rest)
        return _KINDS.get(scheme, "unknown") if complete else "unknown", rest
    parts = source.split("/")
    is_repository = len(parts) == 2 and all(parts) and not source.startswith((".", "~", "/"))
    return "huggingface" if is_repository else "path", source


def vllm_path(name: str, source: str) -> str:
    """A source in the syntax of vLLM's --lora-modules: a path on the server, or the id of a Hugging Face repository.

    vLLM treats everything except absolute paths and existing files as the id of a repository (vllm/lora/utils.py,
    get_adapter_absolute_path), so a URL of another scheme would fail only when the server starts.

    Raises `IncompatibleError`: the source is neither a path nor a repository.
    """
    kind, rest = parsed(source)
    if kind == "path" or (kind == "huggingface" and (rest == source or _REPOSITORY.fullmatch(rest))):
        return rest
    raise refused(name, source, "a path on the server or a Hugging Face repository (vLLM reads nothing else)")


def address(name: str, source: str, prefixes: Mapping[str, str], expected: str) -> str:
    """A source in the syntax of a stack: its scheme is replaced by the prefix of its kind. Raises `IncompatibleError`:
    `prefixes` lacks its kind, or the source is a relative path."""
    kind, rest = parsed(source)
    if kind not in prefixes or (kind == "path" and not rest.startswith("/")):
        raise refused(name, source, expected)
    return f"{prefixes[kind]}{rest}"


def refused(name: str, source: str, expected: str) -> IncompatibleError:
    """The error for an adapter whose source a format can't read, with a remedy."""
    return IncompatibleError(
        f"Expected the source of adapter {shown(name)} to be {expected}, got {shown(source)}. Give a path "
        f"on the servers or the id of a repository{_ELSEWHERE.get(parsed(source)[0], '')}."
    )
