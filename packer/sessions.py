"""Sessions: conversations whose requests each begin with all earlier turns."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.lengths import MAX_TOKENS
from packer.public import checked

FIRST_TOKEN_S = 0.5  # TTFT that a session expects of each answer, s.
PER_TOKEN_S = 0.03  # Time per output token that a session expects, s.
MAX_TURNS = 1000.0
MAX_THINK_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of an adapter. Its `rate` counts requests of all turns; its `input_tokens` are first prompts only.

    The prompt of a later turn consists of the previous turn's prompt and output and of the tokens that the user adds.
    Arrivals are open loop: a turn arrives `think_s` after the expected end of the previous answer. The answer is
    expected to take `FIRST_TOKEN_S`, plus `PER_TOKEN_S` per output token, regardless of the server's speed.

    `turns`: mean number of requests of a session, 1 … 1000, geometrically distributed; 1: every session has one
    request.
    `think_s`: mean time from an answer to the next turn, s, exponentially distributed.
    `turn_tokens`: mean number of tokens that the user adds in each later turn; their distribution has the shape of
    `input_tokens`. None: the mean of `input_tokens` minus the shared prefix.
    """

    turns: float
    think_s: float = 30.0
    turn_tokens: float | None = None

    @checked
    def __post_init__(self) -> None:
        for key, low, high in (("turns", 1.0, MAX_TURNS), ("think_s", 0.0, MAX_THINK_S)):
            checks.keep_real(self, key, low=low, high=high)
        if self.turn_tokens is not None:
            checks.keep_real(self, "turn_tokens", low=0.0, high=MAX_TOKENS, open_low=True)

    def added_tokens(self, first_tokens: float, shared_prefix_tokens: int) -> float:
        """Mean number of tokens that the user adds in a later turn; `first_tokens`: mean of first prompts."""
        if self.turn_tokens is not None:
            return self.turn_tokens
        return max(1.0, first_tokens - shared_prefix_tokens)

    def grown_tokens(self, first_tokens: float, output_tokens: float, shared_prefix_tokens: int) -> float:
        """Mean prompt over all turns: with geometric turns, turns - 1 requests precede a request on average."""
        added = self.added_tokens(first_tokens, shared_prefix_tokens)
        return first_tokens + (self.turns - 1.0) * (output_tokens + added)

    def gap_s(self, output_tokens: float) -> float:
        """Mean time between the arrivals of two turns, s, if the first has this output length."""
        return self.think_s + FIRST_TOKEN_S + PER_TOKEN_S * output_tokens
