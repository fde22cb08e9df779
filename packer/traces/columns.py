"""Which columns a trace of requests has, under the names that known traces use."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from packer.errors import FileFormatError


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """Names of the columns (lower case) of one kind of trace; `unit_s` is the unit of a numeric time."""

    name: str
    time: str
    input_tokens: str
    output_tokens: str
    adapter: str = "adapter"
    rank: str = "rank"
    unit_s: float = 1.0
    ignored: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, str, str]:
        """The columns without which it isn't this kind."""
        return self.time, self.input_tokens, self.output_tokens

    @property
    def known(self) -> tuple[str, ...]:
        """Every column it may have."""
        return (*self.required, self.adapter, self.rank, *self.ignored)


FORMATS = (
    TraceFormat("packer", "timestamp", "input_tokens", "output_tokens"),
    # Azure LLM inference traces 2023 and 2024.
    TraceFormat("Azure", "timestamp", "contexttokens", "generatedtokens"),
    # Mooncake's times are in ms; hash_ids name the blocks of its prefix cache.
    TraceFormat("Mooncake", "timestamp", "input_length", "output_length", unit_s=1e-3, ignored=("hash_ids",)),
    # BurstGPT's Model is a base model, not an adapter.
    TraceFormat(
        "BurstGPT",
        "timestamp",
        "request tokens",
        "response tokens",
        ignored=("model", "total tokens", "log type", "session id", "elapsed time"),
    ),
)


def recognise(names: Sequence[str], path: str | os.PathLike[str]) -> TraceFormat:
    """The kind of trace with these columns (lower case).

    Raises `FileFormatError`: no known kind has them; the message names the columns found and expected.
    """
    found = ", ".join(name[:40] or "(no name)" for name in names[:30]) or "none"
    for kind in FORMATS:
        if set(kind.required) <= set(names):
            unknown = [name for name in names if name not in kind.known]
            if unknown:
                raise FileFormatError(
                    f"unknown column in a trace like {kind.name}'s. Expected {', '.join(kind.known)}; "
                    f"found: {found}.",
                    path=path,
                    column=unknown[0][:80],
                )
            return kind
    expected = "; ".join(f"{', '.join(kind.required)} ({kind.name})" for kind in FORMATS)
    raise FileFormatError(f"expected the columns of a trace: {expected}. Found: {found}.", path=path)


def looks_like_trace(names: Collection[str]) -> bool:
    """Whether a table with these columns (lower case) lists requests rather than adapters."""
    return "rate" not in names and any(set(kind.required) <= set(names) for kind in FORMATS)
