"""Guess the kind of a file that could not be read, to tell which commands take it, or what to do instead."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from contextlib import suppress

from packer.errors import FileFormatError
from packer.io.shipped import table
from packer.io.tables import separator_of

HEAD_BYTES = 65_536
KINDS = table("packer.io", "recognise.toml")  # Kinds of files, in the order in which they are looked for.


def hint(path: str | os.PathLike[str], read: str) -> tuple[str, str, bool]:
    """Kind that the function `read` expects, kind found with advice ("" if unknown), and whether it is `foreign`."""
    expected = next((kind for kind, row in KINDS.items() if read in row.get("readers", ())), None)
    kind = kind_of(path) if expected else None
    if kind is None or read in KINDS[kind].get("readers", ()):
        return "", "", False
    # In other kinds, rows may break rules of the expected kind, as those of a trace that is taken for a workload.
    foreign = expected == "plan" or KINDS[kind].get("foreign", False)
    return f"expected a {expected}.", described(kind), foreign


def described(kind: str | None) -> str:
    """What a file of a kind is, and which commands take it; "" if the kind is not known."""
    return f"This is a {kind}: {KINDS[kind]['advice']}." if kind else ""


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of a file according to its first bytes or, of Parquet, columns, a key of `KINDS`; None if unknown."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            data = file.read(HEAD_BYTES)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as packed:
                data = packed.read(HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    if data.startswith(b"PAR1"):
        from packer.io.files import read_bytes
        from packer.io.parquet import read_parquet

        with suppress(FileFormatError):
            return _of_columns({name.strip().lower() for name in read_parquet(read_bytes(path)).columns})
        return None
    text = data.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    for kind, row in KINDS.items():
        if "line" in row and re.match(row["line"], text):
            return kind
    if re.match(r"(\[\s*)?\{", text):  # a bracket alone begins a table of TOML
        return _of_json(text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    header = {cell.strip(' "').lower() for line in lines[:1] for cell in line.split(separator_of(line))}
    tables = set(re.findall(r"^[ \t]*\[{1,2}[ \t]*([\w-]+)", text, re.MULTILINE))
    return _of_columns(header) or _with("tables", tables)


def _with(what: str, found: set[str]) -> str | None:
    """The first kind whose keys, tables or columns were all found."""
    return next((kind for kind, row in KINDS.items() if what in row and found.issuperset(row[what])), None)


def _of_json(text: str) -> str | None:
    if known := _with("keys", set(re.findall(r'"(\w+)"\s*:', text))):
        return known
    with suppress(ValueError, RecursionError):
        entry, _ = json.JSONDecoder().raw_decode(text.lstrip("[ \t\r\n"))
        if isinstance(entry, dict):
            names = {str(key).lower() for key in entry}
            a_log = "rate" not in names and not names.isdisjoint(("model", "resourcespans", "resourcelogs"))
            return "log of requests" if a_log else _of_columns(names)
    return None


def _of_columns(names: set[str]) -> str | None:
    from packer.traces.columns import looks_like_trace

    return _with("columns", names) or ("log of requests" if looks_like_trace(names) or "usage" in names else None)
