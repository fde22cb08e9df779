"""Request logs, recognised by their content: CSV, JSON Lines and Parquet, plain or gzip."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from packer import checks
from packer.adapter import MAX_PRIORITY, MAX_RANK
from packer.arrays import FloatArray
from packer.blocks import Blocks
from packer.errors import FileFormatError, located, reader, shown
from packer.io.documents import json_lines
from packer.io.files import decode, read_bytes
from packer.io.frames import pl
from packer.io.parquet import MAGIC, check_plain, read_parquet
from packer.io.tables import COMMENT, Row, csv_lines, csv_rows, frame_rows, header_of, separator_of
from packer.lengths import MAX_TOKENS
from packer.traces.access_log import (
    USUAL,
    Fields,
    LogRow,
    doubt_of,
    frame_of,
    nothing,
    requests_of,
    seconds_of,
    unit_of,
)
from packer.traces.columns import TraceFormat, recognise
from packer.traces.trace import Trace, trace_of_requests

if TYPE_CHECKING:
    Requests = tuple[pl.DataFrame, dict[str, Any]]  # Arguments of `trace_of_requests`: the first, and others by name.

MAX_TIME_S = 1e15
END_BYTES = 1 << 24  # So much of a growing log is read first, which takes about a second.
_JSON_LINES = re.compile(r"[\ufeff\s]*([{\[]|[^\n]*\n\s*\{)")  # Line 1 or 2 is an object: one may be damaged.


@reader
def read_trace(path: str | os.PathLike[str], fields: Fields = USUAL) -> Trace:
    """The requests in a log: CSV, JSON Lines or Parquet, also with gzip; the file may have any name.

    The columns of `packer.traces.columns.FORMATS` (traces) and `KEYS` (access logs of gateways) are known.
    Requests without input or output tokens are failures: they are left out and counted in `dropped`. So is a last line
    that has no line end and can't be read, because a gateway may still be writing it.

    `fields`: columns of a log whose column names are not known.
    Raises `FileFormatError`: the file can't be read, a value breaks a rule, or nothing in it is a request; the message
    names file, row and column.
    """
    return _trace_in(read_bytes(path), path, fields)


@reader
def read_latest(path: str | os.PathLike[str], fields: Fields, window_s: float) -> Trace:
    """The requests at the end of a log that may be long and grow, at least those of its last `window_s`. Of text that
    is not packed only as much as that takes is read; raises what `read_trace` raises."""
    length = END_BYTES
    with suppress(OSError, FileFormatError):  # `read_trace` says what is wrong, and in which row
        while length < os.path.getsize(path):
            with open(path, "rb") as file:
                first = file.readline(END_BYTES)
                file.seek(-length, os.SEEK_END)
                file.readline()
                rest = file.read()
            if not first.endswith(b"\n") or first.startswith((MAGIC, b"\x1f\x8b", b"[", COMMENT.encode())):
                break
            headless = first.lstrip(b"\xef\xbb\xbf \t").startswith(b"{")  # else the first request were the window's
            found = _trace_in(rest if headless else first + rest, path, fields)
            if found.span_s >= window_s:
                return found
            length *= 4
    return read_trace(path, fields)


def _trace_in(data: bytes, path: str | os.PathLike[str], fields: Fields) -> Trace:
    if data.startswith(MAGIC):
        return trace_of(read_parquet(data), path, fields)
    whole, _, last = data.rpartition(b"\n")

    def without_last() -> Trace:
        found = trace_of(decode(whole + b"\n"), path, fields)
        said = "left out the last line, which is cut, or still being written"
        return replace(found, said=(*found.said, said))

    with suppress(FileFormatError):
        if whole[:1] == b"{" and _is_half(last):  # known before a long log is read in vain
            return without_last()
    try:
        return trace_of(decode(data), path, fields)
    except FileFormatError as error:
        with suppress(FileFormatError):
            if whole and last and error.row == data.count(b"\n") + 1:
                return without_last()
        raise


def _is_half(line: bytes) -> bool:
    """Whether a line is the beginning of a JSON object."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.lstrip().startswith(b"{")
    return False


def trace_of(content: str | pl.DataFrame, path: str | os.PathLike[str], fields: Fields = USUAL) -> Trace:
    """The trace in a table or in the text of a .csv or .jsonl file; raises what `read_trace` raises."""
    if not isinstance(content, str):
        kind, found = _read_frame(content, fields)
    elif _JSON_LINES.match(content):
        kind, found = _read_jsonl(content, fields)
    else:
        kind, found = _read_csv(content, fields)
    requests, more = found
    if kind is not None and (fields.skip or fields.strip_prefix):
        requests, more = _without_skipped(requests, more, fields)
    with located():
        return trace_of_requests(requests, os.path.basename(os.fspath(path)), **more)


def _without_skipped(requests: pl.DataFrame, more: dict[str, Any], fields: Fields) -> Requests:
    """The requests to adapters, whose names lose `strip_prefix`; requests to models in `skip` are left out."""
    if "adapter" not in requests.columns:
        return requests, more | {"unmet": fields.unmet(())}
    given, blocks = requests["adapter"], more.get("blocks")
    names = given.str.strip_prefix(fields.strip_prefix)
    names = names.zip_with(names != "", given)
    kept = ~names.is_in(list(fields.skip))
    met = {*names.unique(), *([fields.strip_prefix] if (names != given).any() else [])}
    if not kept.any():
        raise FileFormatError(nothing((), len(names), fields.skip))
    blocks = None if blocks is None else blocks.take(kept.to_numpy())
    found = requests.with_columns(names.alias("adapter")).filter(kept)
    return found, more | {"blocks": blocks, "other": len(names) - len(found), "unmet": fields.unmet(met)}


def _kind(names: Iterable[str], fields: Fields) -> TraceFormat | None:
    """The format of a trace with these columns, of which `fields` renames model, rank or session; None: no trace."""
    columns, optional = set(names), {"model": "adapter", "rank": "rank", "session": "session"}
    own: dict[str, Any] = {optional.get(name, ""): key.lower() for name, key in fields.keys.items()}
    kind = recognise(columns - set(own.values()))
    if kind is None or not own:
        return kind
    return replace(kind, **own) if "" not in own and columns >= set(own.values()) else None


def _read_csv(text: str, fields: Fields) -> tuple[TraceFormat | None, Requests]:
    number, cells = next(csv_lines(text), (1, []))
    names = header_of(cells, number)
    kind = _kind(names, fields)
    if kind is None:
        return None, requests_of(csv_rows(text)[1], fields)
    found = None
    with suppress(pl.exceptions.PolarsError):
        given: dict[str, Any] = {"infer_schema": False, "comment_prefix": COMMENT, "raise_if_empty": False}
        given["separator"] = separator_of(text)
        found = _fast(pl.read_csv(io.StringIO(text), new_columns=names, **given), kind, number)
    return kind, found or _slow(csv_rows(text)[1], kind)


def _read_frame(frame: pl.DataFrame, fields: Fields) -> tuple[TraceFormat | None, Requests]:
    frame = frame.rename(dict(zip(frame.columns, header_of(frame.columns, 0), strict=True)))
    kind = _kind(frame.columns, fields)
    if kind is None:
        return None, requests_of(frame_rows(frame)[1], fields)
    frame = frame.select(
        [
            name
            for name in (*kind.required, kind.adapter, kind.rank, kind.session, kind.priority)
            if name in frame.columns
        ]
    )
    check_plain(frame)
    found = None
    with suppress(pl.exceptions.PolarsError):
        found = _fast(frame.cast(pl.String), kind, 0)
    return kind, found or _slow(frame_rows(frame)[1], kind)


def _read_jsonl(text: str, fields: Fields) -> tuple[TraceFormat | None, Requests]:
    lines = (Row(number, entry) for number, entry in json_lines(text))
    first = next(lines, Row(1, {}))
    kind = _kind((key.strip().lower() for key in first.cells), fields)
    if kind is None:
        return None, requests_of(chain([first], lines), fields)
    required = kind.required

    def checked() -> Iterator[Row]:
        for line in chain([first], lines):
            row = Row(line.number, {key.strip().lower(): value for key, value in line.cells.items()})
            for name in required:
                if name not in row.cells:
                    row.fail(name, "this key is missing.")
            yield row

    return kind, _slow(checked(), kind)


def _fast(frame: pl.DataFrame, kind: TraceFormat, header: int) -> Requests | None:
    """The requests in a frame of strings below line `header`, vectorised; None if `_slow` must read some cell."""
    frame = frame.with_row_index("line", header + 1).filter(~pl.all_horizontal(pl.exclude("line").is_null()))
    names = {"adapter": kind.adapter, "rank": kind.rank, "session": kind.session}
    names |= dict(zip(("time", "input_tokens", "output_tokens"), kind.required, strict=True))
    cells = {key: frame[name].str.strip_chars() for key, name in names.items() if name in frame.columns}
    times = _fast_times(cells.pop("time"), kind.unit_s)
    if times is None or not len(frame) or kind.priority in frame.columns:
        return None
    columns = {"time_s": pl.Series(times[0]), "line": frame["line"]}
    for key, cell in cells.items():
        if key == "session":
            columns[key] = cell.fill_null("")
            continue
        if key == "adapter":
            columns[key], fit = cell, cell.str.len_chars().is_between(1, checks.LONGEST_NAME)
            fit &= ~cell.str.contains(r"\p{Cc}")
        else:
            number = cell.cast(pl.Float64, strict=False)
            fit = number.is_between(0, MAX_RANK if key == "rank" else MAX_TOKENS) & (number == number.round())
            columns[key] = number.cast(pl.Int64, strict=False)
        if fit.null_count() or not fit.all():
            return None
    return pl.DataFrame(columns), {"start_s": times[1]}


def _fast_times(column: pl.Series, unit_s: float) -> tuple[FloatArray, float] | None:
    """Times and their origin, s; None if some cell must be read by `_slow`."""
    numbers = column.cast(pl.Float64, strict=False)
    if not numbers.null_count():
        times: FloatArray = numbers.to_numpy()
        # Times in several units are read cell by cell.
        units = {unit_of(float(edge(times)), unit_s) for edge in (np.min, np.max)} if len(times) else {1.0}
        times = times * min(units)
        return (times, 0.0) if len(units) == 1 and np.all(np.abs(times) <= MAX_TIME_S) else None
    text = column.str.replace("T", " ", literal=True).str.replace(r"Z$", "+00:00")
    zone = "%#z" if text.str.contains(r"[+-]\d\d:?\d\d$").all() else ""
    stamps = text.str.to_datetime(f"%Y-%m-%d %H:%M:%S%.f{zone}", time_unit="ns", strict=False)
    if stamps.null_count():
        return None
    nanoseconds = stamps.dt.timestamp("ns").to_numpy()
    # Subtract before the conversion: a float64 holds seconds since 1970 only to 0.2 µs.
    return (nanoseconds - nanoseconds[:1]) * 1e-9, float(nanoseconds[:1].sum()) * 1e-9


def _slow(rows: Iterable[Row], kind: TraceFormat) -> Requests:
    """The requests, read cell by cell, so that an error names the cell."""
    found: list[LogRow] = []
    ids: list[list[int] | None] = []
    for row in rows:
        time_s = seconds_of(cell := row.cells[kind.time], kind.unit_s)
        if not abs(time_s) <= MAX_TIME_S:
            row.fail(kind.time, f"expected seconds or a date and time, got {shown(cell)}{doubt_of(cell)}.")
        inputs, outputs = (row.integer(name, low=0, high=MAX_TOKENS) for name in kind.required[1:])
        adapter = row.name(kind.adapter) if kind.adapter in row.cells else None
        rank = row.integer(kind.rank, low=0, high=MAX_RANK) if kind.rank in row.cells else None
        session = None if row.is_blank(kind.session) else row.text(kind.session)
        given = not row.is_blank(kind.priority)
        priority = row.integer(kind.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY) if given else 0
        ids.append(_block_ids(row, kind, inputs) if isinstance(row.cells.get(kind.blocks), list) else None)
        found.append(LogRow(time_s, inputs, outputs, adapter, rank, session, None, priority or None, row.number))
        first = found[0]
        if (adapter is None, rank is None) != (first.adapter is None, first.rank is None):
            row.fail("adapter", "expected an adapter and rank in every row or in none.")
    with located(column=kind.blocks):
        return frame_of(found), {"blocks": _blocks(ids, kind.block_tokens)}


def _blocks(ids: Sequence[list[int] | None], tokens: int) -> Blocks | None:
    """The blocks of all requests; None if some request has none."""
    known = [each for each in ids if each is not None]
    if not known or len(known) < len(ids):
        return None
    starts = np.cumsum([0, *map(len, known)], dtype=np.int64)
    return Blocks(starts, np.array(list(chain.from_iterable(known)), np.int64), tokens)


def _block_ids(row: Row, kind: TraceFormat, input_tokens: int) -> list[int]:
    """Ids of the full blocks of a prompt; a further id, of a partial block, is dropped."""
    ids, full = row.cells[kind.blocks], input_tokens // kind.block_tokens
    if len(ids) < full:
        row.fail(
            kind.blocks,
            f"expected an id for each {kind.block_tokens} of the {input_tokens:,} tokens of the prompt, {full}, got "
            f"{len(ids)}.",
        )
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**62 for i in ids):
        row.fail(kind.blocks, "expected whole numbers >= 0.")
    return list(ids[:full])
