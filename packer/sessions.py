"""Sessions: requests of one conversation; each begins with all that was said before."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.lengths import MAX_TOKENS

FIRST_TOKEN_S = 0.5
"""Time to the first token of an answer that a session expects."""
PER_TOKEN_S = 0.03
"""Time for each output token that a session expects."""
MAX_TURNS = 1000.0
MAX_THINK_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations of an adapter. Its `rate` counts the requests of all turns, its `input_tokens` are first prompts.

    The prompt of a later turn is the prompt and the output of the turn before it and what the user adds. Turns arrive
    open loop: `think_s` after the turn before it is expected to be answered, which takes `FIRST_TOKEN_S` and
    `PER_TOKEN_S` for each output token, however fast the server is.

    `turns`: mean number of requests of a session, 1 … 1000, geometrically distributed; 1: requests have no later
    turns.
    `think_s`: mean time from an answer to the next turn, s, exponentially distributed.
    `turn_tokens`: mean tokens that the user adds in each later turn, in the shape of `input_tokens`; None: the mean
    of `input_tokens` less the shared prefix.
    """

    turns: float
    think_s: float = 30.0
    turn_tokens: float | None = None

    def __post_init__(self) -> None:
        for key, low, high in (("turns", 1.0, MAX_TURNS), ("think_s", 0.0, MAX_THINK_S)):
            checks.keep_real(self, key, low=low, high=high)
        if self.turn_tokens is not None:
            checks.keep_real(self, "turn_tokens", low=0.0, high=MAX_TOKENS, open_low=True)

    def added_tokens(self, first_tokens: float, shared_prefix_tokens: int) -> float:
        """Mean tokens that the user adds in a later turn, from the mean of first prompts and what these share."""
        if self.turn_tokens is not None:
            return self.turn_tokens
        return max(1.0, first_tokens - shared_prefix_tokens)

    def grown_tokens(self, first_tokens: float, output_tokens: float, shared_prefix_tokens: int) -> float:
        """Mean prompt over the requests of all turns: with geometric turns a request has turns - 1 before it."""
        added = self.added_tokens(first_tokens, shared_prefix_tokens)
        return first_tokens + (self.turns - 1.0) * (output_tokens + added)

    def gap_s(self, output_tokens: float) -> float:
        """Mean time from one turn to the next after an output of this length, s."""
        return self.think_s + FIRST_TOKEN_S + PER_TOKEN_S * output_tokens
