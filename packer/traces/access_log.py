"""Requests from the rows of an access log. Column names of common gateways are known; others can be given."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from packer import checks
from packer.adapter import MAX_RANK
from packer.errors import FileFormatError, shown
from packer.io.documents import parse_json
from packer.io.frames import pl
from packer.io.tables import Row
from packer.lengths import MAX_TOKENS
from packer.times import HOUR_S, LATEST_S, SINCE_1970_S
from packer.traces.columns import KEYS, plain
from packer.words import counted

_TIME_FORMATS = (
    "%d/%b/%Y:%H:%M:%S %z", "%Y/%m/%d %H:%M:%S", "%b %d, %Y @ %H:%M:%S.%f", "%m/%d/%Y, %I:%M:%S.%f %p",
    "%m/%d/%Y, %I:%M:%S %p", "%m/%d/%Y %I:%M:%S %p", "%d.%m.%Y %H:%M:%S.%f", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M",
)  # fmt: skip
_SLASHES = re.compile(r"(\d\d?)/(\d\d?)/(\d{4}),? (\d\d?:\d\d(?::\d\d(?:\.\d+)?)?)", re.ASCII)
"""A date and a time of 24 hours, whose first number is the day in some countries and the month in others."""
_UNITS = ((1e17, 1e-9), (1e14, 1e-6), (1e11, 1e-3))  # Times above the first number are in the unit behind it, s.
_MIDNIGHT = re.compile(r"[T ]00:00(:00(\.0+)?)?Z?$")  # Data frames write midnight for a day.
UNKNOWN = frozenset(("-", "NULL", "null", "None", "NaN", "nan", "\\N"))
"""What web servers, databases and data frames write for a value that they do not have."""
DURATIONS = ("msec",)  # Columns of times in which some logs have durations: only times since 1970 count there.
WRAPPERS = frozenset(
    ("_source", "attributes", "jsonpayload", "content", "result", "line", "log", "message", "_raw", "body")
)
"""Names under which stores of logs keep what a gateway logged: an object, or its JSON text."""
BATCHES = ("resourceSpans", "scopeSpans", "spans", "resourceLogs", "scopeLogs", "logRecords")
"""Lists, one inside another, in which OpenTelemetry's collector keeps several records on one line."""
_OBJECTS = WRAPPERS | {key.partition(".")[0] for names in KEYS.values() for key in names if "." in key}
"""Names of objects, which stores of logs and tables also keep as JSON text."""
TRACE = "traceid"  # Of a trace's spans, several may be requests; other ids name one.
_NESTED = frozenset((dict, list))
_TYPED = ("stringValue", "intValue", "doubleValue", "boolValue")
_PAIR = {"key", "value"}
_NEEDED = {"time": "a time", "input": "input tokens", "output": "output tokens"}
_OPTIONAL = {"model": "adapter", "rank": "rank", "session": "session", "cached": "cached_tokens", "id": "id"}


@dataclass(frozen=True, slots=True)
class Fields:
    """Columns of a log, and how to read its model names.

    `keys`: names of the columns for "time", "model", "input", "output", "id", "rank", "session" and
        "cached", for a log whose names are not in `KEYS`.
    `skip`: names of models that are not adapters.
    `strip_prefix`: prefix that the gateway adds to adapters' names ("hosted_vllm/").
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    skip: Collection[str] = ()
    strip_prefix: str = ""

    @property
    def wanted(self) -> dict[str, tuple[str, ...]]:
        """Column names of each field, in lower case and in order of preference."""
        own = {name: (key,) for name, key in self.keys.items() if key}
        return {name: tuple(key.lower() for key in keys) for name, keys in (KEYS | own).items()}

    def unmet(self, met: Collection[str]) -> tuple[str, ...]:
        """Names in `skip`, and the prefix, that are not among those `met` in a log."""
        return tuple(each for each in (*self.skip, self.strip_prefix) if each and each not in met)


USUAL = Fields()  # The columns of known gateways and traces.


class LogRow(NamedTuple):
    """A request of a log: the columns of `trace_of_requests`, None if not recorded."""

    time_s: float
    input_tokens: int
    output_tokens: int
    adapter: str | None = None
    rank: int | None = None
    session: str | None = None
    cached_tokens: int | None = None
    priority: int | None = None
    line: int = 0
    id: str | None = None


def frame_of(requests: Sequence[LogRow]) -> pl.DataFrame:
    """Requests as columns. Columns that some request lacks are left out, but one session, priority or count of cached
    tokens is enough: vLLM gives no count if it is 0 (vllm/entrypoints/openai/chat_completion/serving.py)."""
    kinds = {"time_s": pl.Float64, "adapter": pl.String, "session": pl.String}
    schema = {name: kinds.get(name, pl.Int64) for name in LogRow._fields[:-1]}
    cells: dict[str, list[Any]] = {name: [row[k] for row in requests] for k, name in enumerate(schema)}
    # JSON may hold surrogates, which a column of texts may not.
    cells["session"] = [each and each.encode("utf-8", "backslashreplace").decode() for each in cells["session"]]
    found = pl.DataFrame(cells, schema=schema)
    usual: dict[str, Any] = {"session": "", "priority": 0, "cached_tokens": 0}
    always = LogRow._fields[:3]
    some = [each for each in found if each.name in always or each.null_count() < len(each)]
    filled = (each.fill_null(usual[each.name]) if each.name in usual else each for each in some)
    return pl.DataFrame([each for each in filled if not each.null_count()])


def requests_of(rows: Iterable[Row], fields: Fields) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The first argument of `trace_of_requests`, and further ones, from the rows of a log.

    Rows without token counts (failures) are left out and counted. So are rows without a model (health checks), unless
    no row has a model: then the log names no adapters.

    Raises `FileFormatError`: a value breaks a rule, or no row is a request; names the row.
    """
    wanted = fields.wanted
    spelled = {plain(key): key for keys in wanted.values() for key in keys}
    seen: dict[str, None] = {}

    @lru_cache(1000)
    def layout(columns: tuple[str, ...]) -> tuple[list[str], dict[str, list[str]]]:
        """The usual names of columns, and which of them each field may be in; the same for all rows with them."""
        usual = {key: _usual(key, spelled) for key in columns}
        names = [key if usual[key] in usual else usual[key] for key in columns]
        if len(seen) < 200:
            seen.update(dict.fromkeys([key[:40] for key in dict.fromkeys(names)][:50]))
        return names, {name: [key for key in keys if key in names] for name, keys in wanted.items()}

    requests: list[LogRow] = []
    left_out, met = Counter[str](), set[str]()
    for row in _records(rows):
        cells = _flat(row.cells)
        names, columns = layout(tuple(cells))
        flat = Row(row.number, dict(zip(names, cells.values(), strict=True)))
        found = _request(flat, columns, fields, met)
        if isinstance(found, str):
            left_out[found] += 1
        else:
            requests.append(found)
    if not seen:
        raise FileFormatError("expected at least one request, got none: no line below the header has a value.")
    requests, said = _joined(requests)
    whole = [each for each in requests if each.input_tokens and each.output_tokens]
    left_out["failed"] += len(requests) - len(whole)
    requests = whole
    for name, key in fields.keys.items():
        blank = all(getattr(each, _OPTIONAL.get(name, "time_s")) is None for each in requests)
        if blank and (requests or key.lower()[:40] not in seen):
            rule = f"no request has a value here, where --key {name} says that it stands."
            raise FileFormatError(f"{rule} Found: {_found(seen)}.", column=key)
    if named := [request for request in requests if request.adapter is not None]:
        left_out["other"] += len(requests) - len(named)
        requests = named
    elif left_out["skipped"]:
        requests = []
    unknown = [name for name in _NEEDED if not seen.keys() & set(wanted[name])]
    if not requests and not unknown and (failed := left_out["failed"]):
        rule = "expected at least one request with input and output tokens"
        raise FileFormatError(f"{rule}, got {counted(failed, 'request')} without.")
    if not requests:
        raise FileFormatError(nothing(seen, left_out["skipped"], fields.skip, unknown))
    more = {"dropped": left_out["failed"], "other": left_out["other"] + left_out["skipped"]}
    return frame_of(requests), more | {"unmet": fields.unmet(met), "said": said}


def _joined(requests: list[LogRow]) -> tuple[list[LogRow], tuple[str, ...]]:
    """The requests, where lines of one id that look like parts of one request are joined, and what to say about it. If
    most repeated ids are in other lines, too, they do not name requests, and no lines are joined."""
    lines: dict[str | None, list[LogRow]] = {}
    for request in requests:
        lines.setdefault(request.id, []).append(request)
    lines.pop(None, None)
    several = [sorted(each, key=itemgetter(0, 2)) for each in lines.values() if len(each) > 1]
    parts = {each[0].id: each for each in several if _are_parts(each)}
    odd, said = len(several) - len(parts), list[str]()
    if odd:
        why = "are in several lines that are no parts of one request: they count one by one"
        said.append(f"{odd:,} of {len(lines):,} ids {why}")
    if len(parts) > odd:
        count = sum(map(len, parts.values())) - len(parts)
        said.append(f"joined {counted(count, 'line')} to others with the same id, as parts of one request")
        requests = [each for each in requests if each.id not in parts]
        requests += map(_joint, parts.values())
    return requests, tuple(said)


def _are_parts(lines: Sequence[LogRow]) -> bool:
    """Whether lines, in order of time, may be parts of one request: chunks of a stream, its start and end, or copies.
    They have one adapter and prompt, where these are known, and outputs that rise, but for two copies: more of them are
    the requests of a user, all of one length. Of two spans of a trace, the second may name the base model."""
    names, inputs = {each.adapter for each in lines}, {each.input_tokens for each in lines}
    outputs = [each.output_tokens for each in lines]
    near = lines[-1].time_s - lines[0].time_s <= HOUR_S
    copies = sum(map(bool, outputs)) - len({*outputs} - {0})
    twice = len(lines) == 2 and outputs[0] == outputs[1] > 0 and str(lines[0].id).startswith(TRACE)
    alike = (twice or len(names - {None}) < 2) and len(inputs - {0}) < 2 and copies <= 2
    return near and alike and outputs == sorted(outputs)


def _joint(lines: Sequence[LogRow]) -> LogRow:
    """The request of some lines: from the time of the first on, for the adapter that is named first, with the last
    value that is known of each other field."""
    cells: Any = zip(*reversed(lines), strict=True)
    last = LogRow._make(next((cell for cell in column if cell is not None), None) for column in cells)
    inputs = max(each.input_tokens for each in lines)
    adapter = next((each.adapter for each in lines if each.adapter is not None), None)
    return last._replace(time_s=lines[0].time_s, line=lines[0].line, input_tokens=inputs, adapter=adapter)


def nothing(seen: Collection[str], skipped: int, skip: Collection[str], unknown: Sequence[str] = ()) -> str:
    """Message for a log without requests, or without known columns of some fields."""
    if skipped:
        return f"expected requests to adapters, got {skipped:,} to {', '.join(sorted(skip))} alone."
    unknown = unknown or list(_NEEDED)
    columns = ", ".join(f"{name}=NAME" for name in unknown)
    return (
        "expected a log of requests with a time, input and output tokens, got one without "
        f"{', '.join(map(_NEEDED.__getitem__, unknown))}. Found: {_found(seen)}; --key {columns} (of packer init, "
        "workload from-log, evaluate --log) says in which column they are."
    )


def _records(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows; for a batch of OpenTelemetry, the records in its lists."""
    for row in rows:
        batches = [row.cells[name] for name in BATCHES if name in row.cells and isinstance(row.cells[name], list)]
        if batches:
            yield from _records(Row(row.number, entry) for entry in chain(*batches) if isinstance(entry, dict))
        else:
            yield row


def _bare(value: Any) -> Any:
    """A value of OpenTelemetry's JSON without its type, and its list of attributes as an object."""
    if isinstance(value, dict) and len(value) == 1 and next(iter(value)) in _TYPED:
        return next(iter(value.values()))
    if isinstance(value, list) and all(isinstance(each, dict) and each.keys() == _PAIR for each in value):
        return {str(each["key"]): _bare(each["value"]) for each in value}
    return value


def _found(seen: Collection[str]) -> str:
    return ", ".join(list(seen)[:30])


def _usual(key: str, spelled: Mapping[str, str]) -> str:
    """The known name of a column, itself or as the last part of its name with dots; else the column's own."""
    name = plain(key)
    return spelled.get(name) or spelled.get(f"*.{name.rpartition('.')[2]}" if "." in name else "", key)


@lru_cache(1000)
def _names(keys: tuple[str, ...], prefix: str) -> tuple[list[str], bool]:
    """Names of cells in lower case; and whether no cell has a second name, or may be an object as JSON text."""
    names = [f"{prefix}{key}".strip().lower() for key in keys]
    return names, not any(name[:1] == "@" or name in _OBJECTS for name in names)


def _flat(entry: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """The cells of an entry by their names with dots; those within `WRAPPERS`, or with an @, also without it."""
    names, simple = _names(tuple(entry), prefix)
    if simple and _NESTED.isdisjoint(map(type, entry.values())):
        return dict(zip(names, entry.values(), strict=True))
    found, bare = dict[str, Any](), dict[str, Any]()
    for name, value in zip(names, entry.values(), strict=True):
        plain = name.removeprefix("@")
        if isinstance(value, (dict, list)):
            value = _bare(value)
        if isinstance(value, str) and plain in _OBJECTS and value.lstrip().startswith("{"):
            with suppress(FileFormatError):
                value = parse_json(value, row=0)
        if isinstance(value, dict) and depth < 4:
            found |= _flat(value, f"{name}.", depth + 1)
            bare |= _flat(value, "", depth + 1) if plain in WRAPPERS else {}
        else:
            found[name] = value
            if plain != name:
                bare[plain] = value
    return bare | found


def _request(row: Row, columns: Mapping[str, Sequence[str]], fields: Fields, met: set[str]) -> LogRow | str:
    """The request of a row, or why it is left out: "other", "skipped" or "failed". `columns`: those of each field, in
    order of preference; `met`: see `Fields.unmet`."""
    cells = row.cells
    where: dict[str, str | None] = dict.fromkeys(KEYS)
    for each, found in columns.items():
        for column in found:
            if (text := str(cells[column])) not in UNKNOWN and text.strip():
                where[each] = column
                break
    if not fields.keys.get("time") and (where["time"] in DURATIONS or len(columns["time"]) > 1):
        dated = (key for key in columns["time"] if _seconds(cells, key) >= SINCE_1970_S)
        where["time"] = next(dated, None if where["time"] in DURATIONS else where["time"])
    if where["time"] is None:
        return "other"
    model = None
    if where["model"] is not None:
        given = row.text(where["model"])
        given = given if given in met else row.name(where["model"])
        model = given.removeprefix(fields.strip_prefix) or given
        met |= {model, fields.strip_prefix if given != model else model}
        if model in fields.skip:
            return "skipped"
    sides = where["input"], where["output"]
    name = None if where["id"] is None else str(row.cells[where["id"]])
    name = f"{TRACE}{name}" if where["id"] == TRACE else name
    half = None in sides
    if half and (model is None or name is None):
        return "other" if model is None else "failed"
    try:
        inputs, outputs = (row.integer(key, low=0, high=MAX_TOKENS) if key else 0 for key in sides)
        half = not (inputs and outputs)
        if half and name is None:
            return "failed"
        rank = None if where["rank"] is None else row.integer(where["rank"], low=0, high=MAX_RANK)
        session = None if where["session"] is None else str(row.cells[where["session"]]).strip()
        most, key = inputs or MAX_TOKENS, where["cached"]
        cached = None if key is None else row.integer(key, low=0, high=most)
        time_s = _time(row, where["time"])
    except FileFormatError:
        if half:  # a failure, whose other cells may have anything
            return "failed"
        raise
    return LogRow(time_s, inputs, outputs, model, rank, session, cached, None, row.number, name)


def _time(row: Row, key: str) -> float:
    """Seconds since 1970 (UTC) from a number or a text."""
    found = _seconds(row.cells, key)
    if not 0.0 <= found < LATEST_S:
        cells = [shown(row.cells[each]) for each in dict.fromkeys((key, "date")) if each in row.cells]
        joined = f"{row.cells.get('date')} {row.cells[key]}"
        rule = f"expected a time from 1970 to 2199, a number or in ISO form, got {' on '.join(cells)}"
        row.fail(key, f"{rule}{doubt_of(row.cells[key]) or doubt_of(joined)}.")
    return found


def _seconds(cells: Mapping[str, Any], key: str) -> float:
    """A cell as a time, s; a time of day is joined to the day in the column `date`, if the row has one."""
    found = seconds_of(cells[key])
    if not math.isnan(found) or "date" not in cells:
        return found
    day = _MIDNIGHT.sub("", str(cells["date"]).strip())
    return seconds_of(f"{day} {cells[key]}")


def unit_of(number: float, unit_s: float = 1.0) -> float:
    """The unit of a numeric time, s: `unit_s`; if this is 1, judged by the magnitude of the time since 1970."""
    for limit, unit in _UNITS if unit_s == 1.0 else ():
        if number > limit:
            return unit
    return unit_s


def seconds_of(cell: object, unit_s: float = 1.0) -> float:
    """A cell as a time, s: a number in its unit, or a date in UTC or its zone; NaN if it is neither."""
    text = str(cell).strip().removesuffix(" UTC")
    if ":" not in text:
        with suppress(ValueError, OverflowError):
            number = checks.decimal(text)
            return number * unit_of(number, unit_s)
    if len(text) <= len("2026-02-01"):  # a day without a time of day
        return math.nan
    if (found := _SLASHES.fullmatch(text)) and not doubt_of(text):
        first, second, year, clock = found.groups()
        month, day = sorted((int(first), int(second)))
        text = f"{year}-{month:02d}-{day:02d} {'0' * (clock[1] == ':')}{clock}"
    for form in (None, *_TIME_FORMATS):
        try:
            stamp = datetime.fromisoformat(text) if form is None else datetime.strptime(text, form)
            return (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            pass
    return math.nan


def doubt_of(cell: object) -> str:
    """What is in doubt about a time, to be said behind it; "" if nothing is known."""
    text = str(cell).strip().removesuffix(" UTC")
    if found := _SLASHES.fullmatch(text):
        year, one, other = found[3], int(found[1]), int(found[2])
        either = f"{year}-{one:02d}-{other:02d} or {year}-{other:02d}-{one:02d}"
        return f": is the month {one} or {other}? Write {either}" if one != other and max(one, other) <= 12 else ""
    return ": write it with a decimal point" if re.fullmatch(r"\d+,\d+", text, re.ASCII) else ""
