"""Requests from the access log of a gateway: JSON lines with time, model and token counts."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from packer import checks
from packer.errors import FileFormatError, ValidationError, reader, shown
from packer.io.documents import json_lines
from packer.io.files import decode, read_bytes
from packer.io.shipped import table
from packer.io.tables import Row
from packer.lengths import MAX_TOKENS
from packer.traces.trace import Trace, trace_of_rows

KEYS = {field: tuple(names) for field, names in table("packer.traces", "access_log.toml").items()}
"""Names under which gateways log each field, in order of preference; dots go into nested objects."""

_TIME_FORMATS = ("%d/%b/%Y:%H:%M:%S %z", "%Y/%m/%d %H:%M:%S")
_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))
"""Numeric times above the first value are in the second unit: ns, µs, ms; else s."""
_LATEST_S = 7_258_118_400.0  # 2200-01-01


@dataclass(frozen=True, eq=False)
class AccessLog:
    """A log as a trace with adapters.

    `start_s`: time of the first request, s since 1970 (UTC). `other`: lines that are not completion requests.
    """

    trace: Trace
    start_s: float
    other: int


@reader
def read_access_log(
    path: str | os.PathLike[str],
    *,
    keys: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
    strip_prefix: str = "",
    growing: bool = False,
) -> AccessLog:
    """The requests in a log of JSON lines (also .gz).

    Lines without a model or without token counts (health checks, failures) are left out and counted, as are
    requests to the models in `skip` (the base model, for example).

    `path`: the log.
    `keys`: where "time", "model", "input" and "output" are, for a log that uses other names than `KEYS`.
    `skip`: names of models that are not adapters.
    `strip_prefix`: what the gateway puts before adapters' names ("hosted_vllm/").
    `growing`: the gateway still writes to it: a last line that has no end yet is left out unless it is whole JSON.
    Raises `FileFormatError`: a line isn't JSON, a value breaks a rule, or no line is a request; names the row.
    """
    wanted = {name: (given,) if (given := (keys or {}).get(name)) else KEYS[name] for name in KEYS}
    requests: list[tuple[float, str, int, int]] = []
    left_out: Counter[str] = Counter()
    seen: set[str] = set()
    data = read_bytes(path)
    text = decode(_without_half_line(data) if growing else data)
    for number, entry in json_lines(text):
        row = Row(number, _flat(entry))
        seen.update([key[:40] for key in row.cells][:50] if len(seen) < 200 else ())
        found = _request(row, wanted, skip, strip_prefix)
        if isinstance(found, str):
            left_out[found] += 1
        else:
            requests.append(found)
    if not requests and left_out["skipped"]:
        listed = ", ".join(sorted(skip))
        rule = f"expected requests to adapters, got {left_out['skipped']:,} to {listed} alone."
        raise FileFormatError(rule)
    if not requests:
        raise FileFormatError(
            "no line has a time, a model and token counts. Found the keys "
            f"{', '.join(sorted(seen)[:30]) or 'none'}; name the right ones with --key."
        )
    times, models, inputs, outputs = zip(*requests, strict=True)
    tokens = (np.array(column, dtype=np.int64) for column in (inputs, outputs))
    source = os.path.basename(os.fspath(path))
    trace = trace_of_rows(np.array(times), *tokens, adapter=models, dropped=left_out["failed"], source=source)
    return AccessLog(trace, min(times), left_out["other"] + left_out["skipped"])


def _without_half_line(data: bytes) -> bytes:
    """The bytes of a log without a last line that is still being written."""
    whole, newline, last = data.rpartition(b"\n")
    try:
        json.loads(last)
    except (ValueError, RecursionError):
        return whole + newline
    return data


def _flat(entry: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, dict) and depth < 4:
            found |= _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            found[f"{prefix}{key}"] = value
    return found


def _request(
    row: Row, wanted: Mapping[str, tuple[str, ...]], skip: Collection[str], strip_prefix: str
) -> tuple[float, str, int, int] | str:
    """Time (s), model, input and output tokens of a line, or why it is left out: "other", "skipped" or "failed"."""
    where = {
        name: next((key for key in keys if row.cells.get(key) is not None), None)
        for name, keys in wanted.items()
    }
    if where["model"] is None or where["time"] is None:
        return "other"
    try:
        model = checks.name("a model", row.cells[where["model"]])
    except ValidationError as error:
        row.fail(where["model"], str(error))
    model = model.removeprefix(strip_prefix) or model
    if model in skip:
        return "skipped"
    if where["input"] is None or where["output"] is None:
        return "failed"
    inputs, outputs = (row.integer(key, low=0, high=MAX_TOKENS) for key in (where["input"], where["output"]))
    return (_time(row, where["time"]), model, inputs, outputs) if inputs and outputs else "failed"


def _time(row: Row, key: str) -> float:
    """Seconds since 1970 (UTC) from a number or a text; times without a zone are UTC."""
    value = row.cells[key]
    found = math.nan if isinstance(value, bool) else _seconds(str(value).strip())
    if not 0.0 <= found < _LATEST_S:
        row.fail(key, f"expected a time from 1970 to 2199, got {shown(value)}.")
    return found


def _seconds(text: str) -> float:
    """A time in s; NaN where the text is none."""
    with suppress(ValueError, OverflowError):
        number = float(text)
        return number * next((unit for limit, unit in _UNITS if number > limit), 1.0)
    for form in (None, *_TIME_FORMATS):
        with suppress(ValueError, OverflowError):
            parsed = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
            return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    return math.nan
