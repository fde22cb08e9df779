"""Which columns a trace of requests has, under the names that known traces use."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """Names of the columns (lower case) of one kind of trace; `unit_s` is the unit of a numeric time.

    `blocks`: ids of the prompt's blocks of `block_tokens` tokens; an id stands for all blocks before it, too.
    """

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
        """The columns without which it isn't this kind."""
        return self.time, self.input_tokens, self.output_tokens

    @property
    def known(self) -> tuple[str, ...]:
        """Every column it may have."""
        own = (self.adapter, self.rank, self.session, self.priority, self.blocks)
        return (*self.required, *filter(None, own), *self.ignored)


FORMATS = tuple(
    TraceFormat(name, **{**row, "ignored": tuple(row.get("ignored", ()))})
    for name, row in table("packer.traces", "columns.toml").items()
)


KEYS = {field: tuple(names) for field, names in table("packer.traces", "access_log.toml").items()}
"""Names under which gateways log each field, in order of preference; dots go into nested objects."""


def recognise(names: Collection[str]) -> TraceFormat | None:
    """The kind of trace with these columns (lower case) and no others; None where it is not a known one."""
    given = set(names)
    return next((kind for kind in FORMATS if set(kind.required) <= given <= set(kind.known)), None)


def looks_like_trace(names: Collection[str]) -> bool:
    """Whether a table with these columns (lower case) lists requests rather than adapters."""
    known = any(set(kind.required) <= set(names) for kind in FORMATS)
    named = all({key.lower() for key in KEYS[field]} & set(names) for field in ("time", "input", "output"))
    return "rate" not in names and (known or named)
