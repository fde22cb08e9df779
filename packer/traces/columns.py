"""Columns of request traces, under the names that known formats use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """Names of the columns (lower case) of one format of traces; `unit_s`: unit of numeric times, s. `blocks`: column
    with ids of the prompt's blocks of `block_tokens` tokens; an id also identifies all blocks before."""

    name: str
    time: str
    input_tokens: str
    output_tokens: str
    adapter: str = "adapter"
    rank: str = "rank"
    unit_s: float = 1.0
    session: str = "session"
    priority: str = "priority"
    blocks: str = ""
    block_tokens: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, str, str]:
        """The columns that every trace of this format has."""
        return self.time, self.input_tokens, self.output_tokens

    @property
    def known(self) -> tuple[str, ...]:
        """All columns that a trace of this format may have."""
        own = (self.adapter, self.rank, self.session, self.priority, self.blocks)
        return (*self.required, *filter(None, own), *self.ignored)


FORMATS = tuple(
    TraceFormat(name, **{**row, "ignored": tuple(row.get("ignored", ()))})
    for name, row in table("packer.traces", "columns.toml").items()
)


KEYS = {field: tuple(names) for field, names in table("packer.traces", "access_log.toml").items()}
"""Names under which gateways log each field, in order of preference; dots address nested objects."""


@lru_cache(4096)
def plain(name: str) -> str:
    """A column's name without capitals, spaces, hyphens, underscores and a zone: `Time [UTC]` is `time`."""
    return name.lower().removesuffix("[utc]").translate({ord(sign): None for sign in " -_"})


def recognise(names: Collection[str]) -> TraceFormat | None:
    """The format with these columns (lower case): all required ones, and only known ones. None if no format fits."""
    given = set(names)
    return next((kind for kind in FORMATS if set(kind.required) <= given <= set(kind.known)), None)


def looks_like_trace(names: Collection[str]) -> bool:
    """Whether a table with these columns (lower case) lists requests rather than adapters."""
    known = any(set(kind.required) <= set(names) for kind in FORMATS)
    given = set(map(plain, names))
    named = all(not given.isdisjoint(map(plain, KEYS[field])) for field in ("time", "input", "output"))
    return "rate" not in names and (known or named)
