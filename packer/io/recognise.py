"""Guess the kind of a file that could not be read, to tell which commands take it, or what to do instead."""

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
    "benchmark result": "packer live validate --bench and packer profiles fit --bench take it",
    "model configuration": "--model takes it",
}
"""Kind of file → the commands that take it, in words."""
INSTEAD = {
    "scrape of /metrics": "its counters run since the server's start and name no adapter's rate. packer workload "
    "from-metrics --url PROMETHEUS reads rates over time; packer profiles fit --bench takes a scrape",
    "plain access log": "it names neither adapters nor tokens. Let the gateway log JSON lines with the time, model, "
    "prompt_tokens and completion_tokens of each request: docs/how-to/measure-traffic.md",
    "spreadsheet": "save it as CSV, with commas between the cells",
}
"""Kind of file that no command reads as a table → what to do instead, in words."""
KEYS = {
    "plan": {"n_gpus", "solver"},
    "workload": {"adapters", "rank"},
    "benchmark result": {"request_throughput", "total_input_tokens"},
    "model configuration": {"architectures", "hidden_size"},
}
"""Kind of file → keys that identify it in JSON."""
LINES = {
    "scrape of /metrics": r"# (HELP|TYPE) [\w:]+ |vllm:\w+(\{.*\})? [-+\d.naif]+",
    "plain access log": r'\S+ \S+ \S.* \[[^]]+\] "[A-Z]+ [^"]*" \d{3} ',
}
"""Kind of file → regular expression for the start of its text."""
READERS = {
    "load_plan": "plan",
    "read_workload": "workload",
    "read_trace": "log of requests",
    "_read_profile": "profile",
    "read_cluster": "cluster",
}
"""Function that reads a file → the kind of file that it expects."""


def hint(path: str | os.PathLike[str], read: str) -> tuple[str, str, bool]:
    """Kind that the function `read` expects, kind found with advice ("" if unknown), and whether it is in `INSTEAD`."""
    kind = kind_of(path) if read in READERS else None
    if kind is None or kind == READERS[read]:
        return "", "", False
    return f"expected a {READERS[read]}.", f"This is a {kind}: {(TAKEN_BY | INSTEAD)[kind]}.", kind in INSTEAD


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The kind of a file according to its first bytes, a key of `TAKEN_BY` or `INSTEAD`; None if unknown."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            data = file.read(HEAD_BYTES)
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as packed:
                data = packed.read(HEAD_BYTES)
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    if data.startswith(b"PK\3\4"):
        return "spreadsheet"
    text = data.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    for kind, line in LINES.items():
        if re.match(line, text):
            return kind
    if text.startswith("{"):
        return _of_json(text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    header = {cell.strip(' "').lower() for line in lines[:1] for cell in line.split(",")}
    return _of_columns(header) or _of_toml(text)


def _of_json(text: str) -> str | None:
    keys = set(re.findall(r'"(\w+)"\s*:', text))
    if known := [kind for kind, own in KEYS.items() if own <= keys]:
        return known[0]
    with suppress(ValueError, RecursionError):
        entry = json.loads(text.partition("\n")[0])
        if isinstance(entry, dict):
            names = {str(key).lower() for key in entry}
            return "log of requests" if names & {"model", "usage"} else _of_columns(names)
    return None


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
