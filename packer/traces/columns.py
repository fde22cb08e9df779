"""Which columns a trace of requests has, under the names that known traces use."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from packer.errors import FileFormatError
from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """Names of the columns (lower case) of one kind of trace; `unit_s` is the unit of a numeric time.

    `blocks`: ids of the blocks of `block_tokens` tokens of the prompt, each of which stands for all before it, too.
    """

    name: str
    time: str
    input_tokens: str
    output_tokens: str
    adapter: str = "adapter"
    rank: str = "rank"
    unit_s: float = 1.0
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
        return (
            *self.required,
            self.adapter,
            self.rank,
            *([self.blocks] if self.blocks else []),
            *self.ignored,
        )


FORMATS = tuple(
    TraceFormat(name, **{**row, "ignored": tuple(row.get("ignored", ()))})
    for name, row in table("packer.traces", "columns.toml").items()
)


def recognise(names: Sequence[str]) -> TraceFormat:
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
                    column=unknown[0][:80],
                )
            return kind
    expected = "; ".join(f"{', '.join(kind.required)} ({kind.name})" for kind in FORMATS)
    raise FileFormatError(f"expected the columns of a trace: {expected}. Found: {found}.")


def looks_like_trace(names: Collection[str]) -> bool:
    """Whether a table with these columns (lower case) lists requests rather than adapters."""
    return "rate" not in names and any(set(kind.required) <= set(names) for kind in FORMATS)
