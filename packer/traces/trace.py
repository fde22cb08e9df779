"""A trace of requests, before or after they are assigned to adapters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from packer.arrays import FloatArray, IntArray, distinct
from packer.arrival import RequestTrace, stepped
from packer.blocks import Blocks, at_rows
from packer.errors import ValidationError, shown
from packer.io.frames import pl
from packer.times import DAY_S, LATEST_S
from packer.words import counted, none_called

SHORTEST_STEP_S = 0.1
FEWEST_STEPPED, SHARE_STEPPED = 50, 0.02
"""Times count as recorded in steps if there are at least `FEWEST_STEPPED` requests, of which at least this share has
the same time as the previous request."""
STRAY, APART = 0.1, 3.0
"""Requests are strays if they are at most this share and, in time, further from the rest than this many of its spans,
and days."""
SHARE_TWICE = 0.1  # Note requests that equal the one before them from this share of a log on.


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of time.

    `time_s`: float64 (n,), seconds since the first request, sorted.
    `input_tokens`, `output_tokens`: int64 (n,), >= 1.
    `adapter`: int64 (n,), index into `names`; None if not recorded.
    `names`: names of the adapters; each has at least one request.
    `ranks`: rank of each adapter; None if not recorded.
    `blocks`, `sessions`, `priority`, `step_s`, `start_s`: as in `RequestTrace`.
    `cached_tokens`: int64 (n,), tokens of each prompt that the server found in its KV cache; None if not recorded.
    `dropped`: number of requests left out because they had no tokens, which is how traces record failures.
    `other`: number of lines left out because they are not requests to adapters.
    `unmet`: names of models to skip, and a prefix to strip, that no request has.
    `said`: what else was left out or joined, in sentences.
    `source`: name of the trace.
    """

    time_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    adapter: IntArray | None = None
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    dropped: int = 0
    source: str = "trace"
    step_s: float = 0.0
    blocks: Blocks | None = None
    other: int = 0
    unmet: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    start_s: float = 0.0
    sessions: IntArray | None = None
    cached_tokens: IntArray | None = None
    priority: IntArray | None = None

    def __post_init__(self) -> None:
        if len(self.time_s) == 0:
            raise ValidationError("Expected a trace to have at least one request with tokens, got 0.")
        if self.adapter is not None and len(distinct(self.adapter)) != len(self.names):
            raise ValidationError("Expected every adapter of a trace to have a request.")

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first request to the last."""
        return float(self.time_s[-1] - self.time_s[0])

    @property
    def lasting_s(self) -> float:
        """`span_s`; raises `ValidationError` if it is 0, because such a trace has no rates."""
        if self.span_s <= 0:
            got = f"got {counted(len(self), 'request')} at one time in {self.source}"
            rule = "Expected requests that last longer than 0 s to measure rates"
            raise ValidationError(f"{rule}, {got}: take a longer log, or write a fleet (adapter,rank,rate).")
        return self.span_s

    @property
    def owner(self) -> IntArray:
        """`adapter`; raises `ValidationError` if it is not recorded."""
        if self.adapter is None:
            raise ValidationError("Expected a trace whose requests name their adapters.")
        return self.adapter

    @property
    def notes(self) -> list[str]:
        """What to tell a user about how the log was read."""
        said = none_called(self.unmet, "--skip, --strip-prefix", self.names) + stepped(self.step_s)
        columns = (self.time_s, self.input_tokens, self.output_tokens, self.adapter)
        same = [np.diff(each) == 0 for each in columns if each is not None]
        if (twice := int(np.all(same, axis=0).sum())) > SHARE_TWICE * len(self):
            same_as = "equal the one before in time, adapter and tokens: does the log have lines twice?"
            said.append(f"{twice:,} of {len(self):,} requests {same_as}")
        if self.dropped:
            every = counted(len(self) + self.dropped, "request")
            said.append(f"left out {self.dropped:,} of {every}, which have no tokens: no rate counts them")
        if self.other:
            said.append(f"left out {counted(self.other, 'line')} of other kinds or models")
        return [*said, *self.said]

    def take(self, rows: IntArray) -> Trace:
        """The requests of some rows, which must be in order of time and include at least one of each adapter."""
        return replace(self, **at_rows(self, rows))

    def requests(self) -> RequestTrace:
        """The requests for replay; every request must have an adapter."""
        return RequestTrace(
            self.time_s, self.owner, self.input_tokens, self.output_tokens, blocks=self.blocks, sessions=self.sessions,
            priority=self.priority, step_s=self.step_s, start_s=self.start_s, notes=tuple(self.notes),
        )  # fmt: skip


def step_of(time_s: FloatArray) -> float:
    """The step of times float64 (n,), sorted, from 0, s; 0 if it is below `SHORTEST_STEP_S` or few times are equal."""
    gaps = np.diff(time_s)
    apart = gaps[gaps > 1e-6]
    if len(time_s) < FEWEST_STEPPED or not len(apart) or len(apart) > (1.0 - SHARE_STEPPED) * len(gaps):
        return 0.0
    step_s = float(apart.min())
    parts = time_s / step_s
    whole = bool(np.allclose(parts, np.round(parts), rtol=0.0, atol=1e-3))
    return round(step_s, 6) if step_s >= SHORTEST_STEP_S and whole else 0.0


def spread(time_s: FloatArray, step_s: float) -> FloatArray:
    """Times spread uniformly at random over their steps, sorted and starting at 0; unchanged if the step is 0. Requests
    that a log rounds to one time did not arrive simultaneously; replayed like that, they would queue without reason.
    Given their number, Poisson arrivals are uniform over a step. The draw is the same at every call."""
    if step_s == 0.0 or not len(time_s):
        return time_s
    inside = np.random.default_rng(0).random(len(time_s))
    spread_s: FloatArray = np.sort(np.round(time_s / step_s) + inside) * step_s
    spread_s -= spread_s[0]
    return spread_s


def trace_of_requests(
    requests: pl.DataFrame, source: str, *, blocks: Blocks | None = None, start_s: float = 0.0, dropped: int = 0,
    other: int = 0, unmet: tuple[str, ...] = (), said: tuple[str, ...] = (),
) -> Trace:  # fmt: skip
    """The requests of a file as a trace, sorted by time; requests without tokens are left out and counted in `dropped`.

    Strays (`STRAY`), which a wrong clock put into another year, are left out, too.

    `requests`: in any order; the columns time_s, input_tokens and output_tokens, and perhaps adapter (its name), rank,
    session ("": a session of its own), cached_tokens, priority and line (in the file). `blocks`: blocks of the prompts.
    `start_s`: origin of the times, s. `dropped`, `other`, `unmet`, `said`: as in `Trace`.
    Raises `ValidationError`: no request has tokens, or an adapter has several ranks.
    """
    full = requests.with_row_index("row").filter(pl.col("input_tokens") > 0, pl.col("output_tokens") > 0)
    kept = full.sort("time_s", maintain_order=True)
    low, high = _without_strays(kept["time_s"].to_numpy())
    said = (*said, *_far(pl.concat([kept[:low], kept[high:]]), start_s), *_set_back(full))
    kept = kept[low:high]
    column = {each.name: each.to_numpy() for each in kept if each.dtype.is_numeric()}
    time_s = column["time_s"] - column["time_s"][:1]
    step_s = step_of(time_s)
    more: dict[str, Any] = {}
    if "adapter" in kept.columns:
        names = kept["adapter"].unique().sort().to_list()
        owner = kept["adapter"].cast(pl.Enum(names)).to_physical().cast(pl.Int64).to_numpy()
        more = {"adapter": owner, "names": tuple(names), "ranks": _ranks(names, owner, column)}
    return Trace(
        spread(time_s, step_s), column["input_tokens"], column["output_tokens"], source=source, step_s=step_s,
        dropped=dropped + len(requests) - len(full), other=other, start_s=start_s + float(column["time_s"][:1].sum()),
        blocks=None if blocks is None else blocks.take(column["row"]), cached_tokens=column.get("cached_tokens"),
        priority=column.get("priority"), sessions=_numbers(kept["session"]) if "session" in kept.columns else None,
        unmet=unmet, said=said, **more,
    )  # fmt: skip


def _without_strays(time_s: FloatArray) -> tuple[int, int]:
    """The first and the last row + 1, in order of time, of the requests that are no strays."""
    low, high = 0, len(time_s)
    few = int(STRAY * high)
    while low + len(time_s) - high < few:
        gaps = np.diff(time_s[low:high])
        k = low + int(gaps.argmax()) + 1
        before = k + len(time_s) - high <= few
        begin, end = (k, high) if before else (low, k)
        apart = gaps.max() > APART * max(DAY_S, time_s[end - 1] - time_s[begin])
        if not apart or begin + len(time_s) - end > few:
            break
        low, high = begin, end
    return low, high


def _far(strays: pl.DataFrame, start_s: float) -> list[str]:
    """A note on strays, with line and time of the first one; empty for none."""
    if not len(strays):
        return []
    time_s, line = start_s + strays["time_s"][0], f"line {strays['line'][0]:,}, " * ("line" in strays.columns)
    day = datetime.fromtimestamp(min(max(time_s, 0.0), LATEST_S), UTC)
    far = f"far in time from all others: {line}{day:%Y-%m-%d}{' …' * (len(strays) > 1)}"
    return [f"left out {counted(len(strays), 'request')} {far}"]


def _set_back(rows: pl.DataFrame) -> list[str]:
    """A note if times, in the order of lines, go back by an hour, in no other way and not to the first; else empty."""
    time_s = rows["time_s"].to_numpy()
    steps_s = np.diff(time_s)
    back = np.flatnonzero(steps_s < -600.0)
    hour = (steps_s > -3601.0) & (steps_s < -3300.0) & (time_s[1:] > time_s[:1] + 600.0)
    if not len(back) or not hour[back].all():
        return []
    where = f" at line {rows['line'][int(back[0]) + 1]:,}" * ("line" in rows.columns)
    return [f"times go back by an hour{where}, as clocks do when summer time ends: that hour counts twice; log UTC"]


def _ranks(names: Sequence[str], owner: IntArray, column: Mapping[str, IntArray]) -> tuple[int, ...] | None:
    """The rank of each adapter, from the columns "rank" and "line" of the requests, which may be missing."""
    if (rank := column.get("rank")) is None:
        return None
    table = np.zeros(len(names), dtype=np.int64)
    table[owner] = rank
    odd = np.flatnonzero(table[owner] != rank)
    if odd.size:
        name, both = shown(names[owner[odd[0]]]), f"{rank[odd[0]]} and {table[owner[odd[0]]]}"
        where = f", the first in row {column['line'][odd[0]]}" if "line" in column else ""
        raise ValidationError(f"Expected one rank for each adapter, got several for {name}: {both}{where}.")
    return tuple(table.tolist())


def _numbers(session: pl.Series) -> IntArray:
    """Session numbers, int64 (n,); a request without a session name gets a session of its own."""
    known: dict[str, int] = {}
    alone = itertools.count(len(session))
    return np.array([known.setdefault(s, len(known)) if s else next(alone) for s in session], dtype=np.int64)
