"""Requests from the access log of a gateway: JSON lines with time, model and token counts."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from packer import checks
from packer.errors import FileFormatError, ValidationError, shown
from packer.io.documents import json_lines
from packer.io.files import decode, read_bytes
from packer.lengths import MAX_TOKENS
from packer.traces.trace import Trace, trace_of_rows

KEYS: dict[str, tuple[str, ...]] = {
    "time": (
        *("timestamp", "time", "@timestamp", "ts", "start_time", "startTime", "created", "created_at"),
        *("time_iso8601", "time_local", "msec", "datetime"),
    ),
    "model": (
        *("adapter", "lora", "lora_name", "lora_adapter", "requested_model", "request.model", "model"),
        *("model_name", "model_group", "gen_ai.request.model", "body.model"),
    ),
    "input": (
        *("prompt_tokens", "input_tokens", "usage.prompt_tokens", "usage.input_tokens"),
        *("response.usage.prompt_tokens", "gen_ai.usage.input_tokens", "num_prompt_tokens"),
    ),
    "output": (
        *("completion_tokens", "output_tokens", "usage.completion_tokens", "usage.output_tokens"),
        *("response.usage.completion_tokens", "gen_ai.usage.output_tokens", "num_generation_tokens"),
    ),
}
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


@dataclass(slots=True)
class _Columns:
    time: list[float] = field(default_factory=list)
    model: list[str] = field(default_factory=list)
    input: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    failed: int = 0
    other: int = 0
    skipped: int = 0


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
    columns = _Columns()
    seen: set[str] = set()
    data = read_bytes(path)
    text = decode(_without_half_line(data) if growing else data, path)
    for row, entry in json_lines(text, path):
        flat = _flat(entry)
        seen.update([key[:40] for key in flat][:50] if len(seen) < 200 else ())
        _add(columns, flat, wanted, path, row, skip, strip_prefix)
    if not columns.time and columns.skipped:
        listed = ", ".join(sorted(skip))
        rule = f"expected requests to adapters, got {columns.skipped:,} to {listed} alone."
        raise FileFormatError(rule, path=path)
    if not columns.time:
        raise FileFormatError(
            "no line has a time, a model and token counts. Found the keys "
            f"{', '.join(sorted(seen)[:30]) or 'none'}; name the right ones with --key.",
            path=path,
        )
    return _log(columns, os.path.basename(os.fspath(path)))


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


def _add(
    columns: _Columns,
    flat: Mapping[str, Any],
    wanted: Mapping[str, tuple[str, ...]],
    path: str | os.PathLike[str],
    row: int,
    skip: Collection[str],
    strip_prefix: str,
) -> None:
    """Add one line to the columns if it is a request."""
    where = {
        name: next((key for key in keys if flat.get(key) is not None), None) for name, keys in wanted.items()
    }
    if where["model"] is None or where["time"] is None:
        columns.other += 1
        return
    try:
        model = checks.name("a model", flat[where["model"]])
    except ValidationError as error:
        raise FileFormatError(str(error), path=path, row=row, column=where["model"]) from None
    model = model.removeprefix(strip_prefix) or model
    if model in skip:
        columns.other += 1
        columns.skipped += 1
        return
    if where["input"] is None or where["output"] is None:
        columns.failed += 1
        return
    tokens = [_tokens(flat[key], path, row, key) for key in (where["input"], where["output"])]
    if min(tokens) == 0:
        columns.failed += 1
        return
    columns.time.append(_time(flat[where["time"]], path, row, where["time"]))
    columns.model.append(model)
    columns.input.append(tokens[0])
    columns.output.append(tokens[1])


def _tokens(value: object, path: str | os.PathLike[str], row: int, key: str) -> int:
    number = value
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 12:
        number = int(value)
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_TOKENS:
        raise FileFormatError(
            f"expected a number of tokens, got {shown(value)}.", path=path, row=row, column=key
        )
    return number


def _time(value: object, path: str | os.PathLike[str], row: int, key: str) -> float:
    """Seconds since 1970 (UTC) from a number or a text; times without a zone are UTC."""
    found = _numeric_time(value)
    if found is None and isinstance(value, str):
        found = _parsed_time(value.strip())
    if found is None or not 0.0 <= found < _LATEST_S:
        rule = f"expected a time from 1970 to 2199, got {shown(value)}."
        raise FileFormatError(rule, path=path, row=row, column=key)
    return found


def _numeric_time(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number * next((unit for limit, unit in _UNITS if number > limit), 1.0)


def _parsed_time(text: str) -> float | None:
    for form in (None, *_TIME_FORMATS):
        try:
            parsed = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
            return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
        except (OverflowError, ValueError):
            continue
    return None


def _log(columns: _Columns, source: str) -> AccessLog:
    trace = trace_of_rows(
        np.array(columns.time), np.array(columns.input, dtype=np.int64), np.array(columns.output, dtype=np.int64),
        adapter=columns.model, dropped=columns.failed, source=source,
    )  # fmt: skip
    return AccessLog(trace, min(columns.time), columns.other)
