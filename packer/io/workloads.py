"""Workload files: CSV, JSON, YAML and Parquet, plain or gzip."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from packer import checks
from packer.adapter import MAX_PRIORITY, MAX_RANK, MAX_RATE, Adapter
from packer.arrival import Arrivals, Bursts
from packer.errors import FileFormatError, IncompatibleError, located, reader, shown
from packer.goal import Goal
from packer.io.documents import parse_json, parse_yaml, yaml_text
from packer.io.files import decode, read_bytes, write_bytes
from packer.io.frames import pl
from packer.io.parquet import check_plain, parquet_bytes, read_parquet
from packer.io.recognise import kind_of
from packer.io.tables import COMMENT, Row, by_adapter, check_columns, csv_rows, csv_text, frame_rows
from packer.lengths import MAX_TOKENS, Lengths
from packer.sessions import MAX_THINK_S, MAX_TURNS, Sessions
from packer.traces.columns import looks_like_trace
from packer.workload import SHAREGPT_CORRELATION, SHAREGPT_INPUT, SHAREGPT_OUTPUT, Workload

REQUIRED = ("adapter", "rank", "rate")
OPTIONAL = (
    "model", "input_tokens", "output_tokens", "input_cv", "output_cv", "length_correlation", "bursts", "own_bursts",
    "trend", "slo_class", "shared_prefix_tokens", "turns", "think_s", "turn_tokens", "priority", "acceptance",
)  # fmt: skip
_LEFT_OUT = ("slo_class", "shared_prefix_tokens", "priority")  # Columns whose cell is empty if the value is None or 0.
_READERS: dict[str, Callable[[Row, str], Any]] = {
    "model": Row.text,
    "slo_class": Row.name,
    "shared_prefix_tokens": partial(Row.integer, low=0, high=MAX_TOKENS),
    "priority": partial(Row.integer, low=-MAX_PRIORITY, high=MAX_PRIORITY),
    "acceptance": partial(Row.real, low=0.0, high=1.0),
}
"""Columns that are fields of an adapter, with the functions that read a cell."""
FORMATS = (".csv", ".tsv", ".json", ".yaml", ".yml", ".parquet")
_ENDINGS = f"{', '.join(FORMATS)} (or that and .gz)"
LOGS = (".jsonl", ".ndjson", ".log")  # Suffixes of request logs in JSON Lines.


@reader
def read_workload(path: str | os.PathLike[str]) -> Workload:
    """A workload from a file.

    The suffix gives the format: .csv or .parquet (columns `adapter,rank,rate`, and optionally `model,
    slo_class, input_tokens, output_tokens` (means), `input_cv, output_cv, length_correlation, bursts, own_bursts,
    trend, shared_prefix_tokens, turns, think_s, turn_tokens, priority, acceptance`), .json or .yaml; each also with
    .gz. A trace of requests (`timestamp, adapter, rank, input_tokens, output_tokens`) gives a workload that replays it.

    Raises `FileFormatError`: the file can't be read, or a value breaks a rule; the message names file, row and column.
    """
    suffix, name = _suffix(path)
    data = read_bytes(path)
    if suffix not in (*FORMATS, *LOGS):
        raise FileFormatError(f"expected a name that ends in {_ENDINGS}, got {suffix!r}.")
    content = read_parquet(data) if suffix == ".parquet" else decode(data)
    if suffix in LOGS or (suffix == ".json" and kind_of(path) == "log of requests"):
        return _replayed_trace(content, path, name)
    if suffix in (".json", ".yaml", ".yml"):
        from packer.io.workload_schema import workload_from_dict

        parse = parse_json if suffix == ".json" else parse_yaml
        return workload_from_dict(parse(str(content)), name=name)
    names, rows = csv_rows(content) if isinstance(content, str) else frame_rows(content)
    if looks_like_trace(names):
        return _replayed_trace(content, path, name)
    if not isinstance(content, str):
        check_plain(content)
    check_columns(names, REQUIRED, OPTIONAL)
    return workload_from_rows(rows, name)


def workload_from_rows(rows: Iterable[Row], name: str) -> Workload:
    """The workload in the rows of a table."""
    adapters: list[Adapter] = []
    known: dict[str, tuple[Any, int]] = {}
    for adapter, row in by_adapter(rows):
        adapters.append(_adapter(adapter, row))
        _read_shared(row, known)
    if not adapters:
        raise FileFormatError("expected at least one adapter, got 0 rows.")
    shared = {column: value for column, (value, _) in known.items()}
    correlation = shared.get("length_correlation", SHAREGPT_CORRELATION)
    bursts: dict[str, Any] = {"common": shared.get("bursts"), "own": shared.get("own_bursts")}
    with located():
        arrivals = Arrivals("bursty", **bursts) if any(bursts.values()) else Arrivals()
        arrivals = arrivals.following(shared.get("trend", ()))
        return Workload(adapters, length_correlation=correlation, arrivals=arrivals, name=name)


def _read_shared(row: Row, known: dict[str, tuple[Any, int]]) -> None:
    """Add the row's values of columns that apply to the whole file; every row that has such a value must agree."""
    for column, read in _OF_ALL.items():
        if row.is_blank(column):
            continue
        value = read(row, column)
        first, number = known.setdefault(column, (value, row.number))
        if first != value:
            rule = f"expected the same value in every row, got {shown(row.text(column))} after another"
            row.fail(column, f"{rule} in row {number}.")


def _bursts(row: Row, column: str) -> Bursts:
    try:
        return Bursts.parse(row.text(column))
    except ValueError:
        row.fail(column, f"Expected cv;time scale:weight;… such as 2.1;8:0.8;24:0.2, got {shown(row.text(column))}.")


def _trend(row: Row, column: str) -> list[float]:
    try:
        found = [checks.decimal(part) for part in row.text(column).split(";")]
        Arrivals().following(found)
    except ValueError:
        found = []
    if len(found) < 2:
        row.fail(column, f"Expected period in s;factor;factor;… such as 300;0.8;1.2, got {shown(row.text(column))}.")
    return found


_OF_ALL: dict[str, Callable[[Row, str], Any]] = {
    "length_correlation": partial(Row.real, low=-1.0, high=1.0),
    "bursts": _bursts,
    "own_bursts": _bursts,
    "trend": _trend,
}
"""Columns whose value applies to the whole file, with the functions that read a cell."""


def _adapter(name: str, row: Row) -> Adapter:
    rank = row.integer("rank", low=0, high=MAX_RANK)
    rate = row.real("rate", low=0.0, high=MAX_RATE)
    inputs = _mean_and_cv(row, "input_tokens", "input_cv", SHAREGPT_INPUT)
    outputs = _mean_and_cv(row, "output_tokens", "output_cv", SHAREGPT_OUTPUT)
    more = {column: read(row, column) for column, read in _READERS.items() if not row.is_blank(column)}
    with row.located("adapter"):
        return Adapter(name, rank, rate, inputs, outputs, sessions=_sessions(row), **more)


def _sessions(row: Row) -> Sessions | None:
    given = {"think_s": MAX_THINK_S, "turn_tokens": float(MAX_TOKENS)}
    values = {key: row.real(key, low=0.0, high=high) for key, high in given.items() if not row.is_blank(key)}
    if row.is_blank("turns"):
        for key in values:
            row.fail(key, "expected turns with it, got an empty cell there.")
        return None
    return Sessions(row.real("turns", low=1.0, high=MAX_TURNS), **values)


def _mean_and_cv(row: Row, mean_column: str, cv_column: str, shape: Lengths) -> Lengths | None:
    if row.is_blank(mean_column):
        if not row.is_blank(cv_column):
            row.fail(cv_column, f"expected a {mean_column} with it, got an empty cell there.")
        return None
    mean = row.real(mean_column, low=0.0, high=1e9, open_low=True)
    if row.is_blank(cv_column):
        return shape.scaled(mean)
    cv = row.real(cv_column, low=0.0, high=100.0)
    return Lengths.gamma(mean, cv) if cv > 0 else Lengths.constant(mean)


def write_workload(
    workload: Workload, path: str | os.PathLike[str], *, force: bool = False, comments: Sequence[str] = ()
) -> None:
    """Write a workload atomically, in the format of the suffix (see `read_workload`). CSV and Parquet store lengths as
    mean and cv; `comments` are written at the top of a CSV or YAML file. Raises `IncompatibleError`: the format can't
    represent this workload, or the suffix is unknown."""
    suffix, _ = _suffix(path)
    if suffix in (".json", ".yaml", ".yml"):
        from packer.io.workload_schema import workload_to_dict

        content = workload_to_dict(workload)
        if suffix == ".json":
            text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        else:
            text = _comment_lines(comments) + yaml_text(content)
        data = text.encode()
    elif suffix == ".csv":
        quoted = any(name.startswith(COMMENT) or "\r" in name for name in workload.names)
        data = (_comment_lines(comments) + csv_text(*table_of(workload), quoted=quoted)).encode()
    elif suffix == ".parquet":
        columns, rows = table_of(workload)
        data = parquet_bytes(pl.DataFrame(rows, schema=columns, orient="row", infer_schema_length=None))
    else:
        raise IncompatibleError(f"Expected the output's name to end in {_ENDINGS}, got {suffix!r}.")
    if os.fspath(path).endswith(".gz"):
        import gzip

        data = gzip.compress(data, mtime=0)
    write_bytes(path, data, force=force)


def table_of(workload: Workload) -> tuple[list[str], list[list[Any]]]:
    """Columns that are not empty, and rows, of a table; raises `IncompatibleError` if it can't be one."""
    blank = next((name for name in (*workload.names, *workload.models) if name != name.strip()), "")
    for what, holds in (
        ("a fine-tuning job", workload.fine_tuning is None),
        (f"{workload.arrivals.kind} arrivals", workload.arrivals.kind in ("poisson", "bursty", "piecewise")),
        ("latency limits (slo)", workload.slo == Goal()),
        (f"a name with blanks around it, got {shown(blank)}", not blank),
    ):
        if not holds:
            raise IncompatibleError(f"A table can't hold {what}: write .json or .yaml instead.")
    inputs = [_cells(a.input_tokens, workload.input_tokens, SHAREGPT_INPUT) for a in workload.adapters]
    outputs = [_cells(a.output_tokens, workload.output_tokens, SHAREGPT_OUTPUT) for a in workload.adapters]
    correlation = workload.length_correlation
    sessions = [adapter.sessions or workload.sessions for adapter in workload.adapters]
    columns: dict[str, list[Any]] = {
        "adapter": list(workload.names),
        "rank": workload.ranks.tolist(),
        "rate": workload.given_rates.tolist(),
        "model": [adapter.model for adapter in workload.adapters],
        "input_tokens": [mean for mean, _ in inputs],
        "output_tokens": [mean for mean, _ in outputs],
        "input_cv": [cv for _, cv in inputs],
        "output_cv": [cv for _, cv in outputs],
        "length_correlation": [None if correlation == SHAREGPT_CORRELATION else correlation] * len(workload),
        "bursts": [workload.arrivals.common and workload.arrivals.common.text] * len(workload),
        "own_bursts": [workload.arrivals.own and workload.arrivals.own.text] * len(workload),
        "trend": [";".join(map(repr, workload.arrivals.trend)) or None] * len(workload),
        **{key: [getattr(each, key) or None for each in workload.adapters] for key in _LEFT_OUT},
        "acceptance": [adapter.acceptance for adapter in workload.adapters],
        **{key: [getattr(each, key, None) for each in sessions] for key in ("turns", "think_s", "turn_tokens")},
    }
    kept = [name for name, cells in columns.items() if any(cell is not None for cell in cells)]
    return kept, [list(row) for row in zip(*(columns[name] for name in kept), strict=True)]


def _cells(own: Lengths | None, default: Lengths, standard: Lengths) -> tuple[float | None, float | None]:
    """Mean and cv as cells; None if the reader would assume the same value."""
    lengths = own or default
    if lengths.kind not in ("gamma", "constant") or lengths.low != 1 or lengths.high is not None:
        what = f"{lengths.kind} lengths{'' if lengths.high is None else ' with bounds'}"
        raise IncompatibleError(f"A table can't hold {what}: write .json or .yaml instead.")
    cv = lengths.cv if lengths.kind == "gamma" else 0.0
    return (None if own is None and lengths == standard else lengths.mean, None if cv == standard.cv else cv)


def _comment_lines(comments: Sequence[str]) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for each in comments for line in each.splitlines() or [""])


def _suffix(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Suffix that defines the format, in lower case and without .gz, and the name without the suffix."""
    base = os.fsencode(Path(path).name).decode("utf-8", "replace")
    base = base[:-3] if base.lower().endswith(".gz") else base
    stem, dot, ending = base.rpartition(".")
    return (f".{ending.lower()}", stem) if dot and stem else ("", base)


def _replayed_trace(content: str | pl.DataFrame, path: str | os.PathLike[str], name: str) -> Workload:
    """The workload that replays a trace whose requests name their adapter and its rank."""
    from packer.traces.measure import measure_workload
    from packer.traces.read import trace_of

    trace = trace_of(content, path)
    if trace.adapter is None or trace.ranks is None:
        rule = f"the requests have no {'adapters' if trace.adapter is None else 'ranks'}; make a workload of them"
        raise FileFormatError(f"{rule}: packer workload from-log {path} --rank 16 -o workload.csv.")
    with located():
        return measure_workload(trace, replay=True, name=name)
