"""One LoRA adapter as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.errors import ValidationError, shown
from packer.lengths import Lengths

MAX_RANK = checks.SLOT_RANKS[-1]
MAX_NAME_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter and its traffic.

    Parameters
    ----------
    name
        Unique within a workload; up to 256 characters.
    rank
        LoRA rank, 1 … 512.
    rate
        Mean request rate, req/s, > 0.
    input_tokens, output_tokens
        Its own length distributions; None takes the workload's.
    """

    name: str
    rank: int
    rate: float
    input_tokens: Lengths | None = None
    output_tokens: Lengths | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not 1 <= len(self.name) <= MAX_NAME_LENGTH:
            rule = f"text of 1 to {MAX_NAME_LENGTH} characters"
            raise ValidationError(f"Expected an adapter's name to be {rule}, got {shown(self.name)}.")
        surrogates = not self.name.isascii() and any("\ud800" <= c <= "\udfff" for c in self.name)
        if surrogates:  # no file or terminal could take it
            raise ValidationError(f"Expected an adapter's name to be valid Unicode, got {shown(self.name)}.")
        who = f"of adapter {self.name!r}"
        object.__setattr__(self, "rank", checks.integer(f"the rank {who}", self.rank, low=1, high=MAX_RANK))
        rate = checks.real(f"the rate {who}", self.rate, low=0.0, high=1e6, open_low=True)
        object.__setattr__(self, "rate", rate)
