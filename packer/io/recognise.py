"""What a file that could not be read is: a plan, a workload, a log, …, and which commands take that."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from contextlib import suppress

HEAD_BYTES = 65_536
TAKEN_BY = {
    "plan": "packer show, evaluate, export and report take it, and packer solve WORKLOAD --from",
    "workload": "packer solve, simulate and sweep take it",
    "log of requests": "packer init and packer workload from-log take it, and packer evaluate PLAN --log",
    "profile": "--profile takes it",
    "cluster": "--cluster takes it",
}
"""Kind of file → the commands for it."""
READERS = {
    "load_plan": "plan",
    "read_workload": "workload",
    "read_trace": "log of requests",
    "_read_profile": "profile",
    "read_cluster": "cluster",
}
"""Function that reads a file → the kind that it is for, which is no news to the user."""


def hint(path: str | os.PathLike[str], read: str) -> tuple[str, str]:
    """Two sentences: what the function `read` expected; what it got and who takes that. "" where that is not clear."""
    kind = kind_of(path) if read in READERS else None
    if kind is None or kind == READERS[read]:
        return "", ""
    return f"expected a {READERS[read]}.", f"This is a {kind}: {TAKEN_BY[kind]}."


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of a file by its first bytes, one of `TAKEN_BY`; None where they do not say."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            data = file.read(HEAD_BYTES)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as packed:
                data = packed.read(HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    text = data.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    if text.startswith("{"):
        return _of_json(text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    header = {cell.strip(' "').lower() for line in lines[:1] for cell in line.split(",")}
    return _of_columns(header) or _of_toml(text)


def _of_json(text: str) -> str | None:
    first = text.partition("\n")[0]
    with suppress(ValueError, RecursionError):
        entry = json.loads(first)
        if isinstance(entry, dict) and "adapters" not in entry:
            keys = {str(key).lower() for key in entry}
            return "log of requests" if keys & {"model", "usage"} else _of_columns(keys)
    keys = set(re.findall(r'"(\w+)"\s*:', text))
    if {"n_gpus", "solver"} <= keys:
        return "plan"
    return "workload" if {"adapters", "rank"} <= keys else None


def _of_columns(names: set[str]) -> str | None:
    from packer.traces.columns import looks_like_trace

    if {"adapter", "rank", "rate"} <= names:
        return "workload"
    return "log of requests" if looks_like_trace(names) else None


def _of_toml(text: str) -> str | None:
    tables = set(re.findall(r"^[ \t]*\[{1,2}[ \t]*([\w-]+)", text, re.MULTILINE))
    if {"model", "gpu", "engine"} <= tables:
        return "profile"
    return "cluster" if {"kinds", "nodes"} <= tables else None
