"""Speculative decoding of a server: how many tokens are drafted, how many of them are kept, what a drafter costs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from packer import checks
from packer.errors import ValidationError, shown

MOST_DRAFTS = 64
LOOK_UPS = ("prompt_lookup_min", "prompt_lookup_max")
DRAFT_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "ngram")
"""Methods of speculative decoding whose drafter proposes the same number of tokens whenever it proposes any."""


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """Speculative decoding, by vLLM's names (`--speculative-config`).

    `acceptance`: drafts that are kept / drafts (`vllm:spec_decode_num_accepted_tokens` / `num_draft_tokens`), for
    adapters without their own (`Adapter.acceptance`). The drafter runs without adapters. Each step costs
    `num_speculative_tokens` passes of it, `draft_pass_ms` each and `draft_token_ms` for each of its tokens.
    `draft_bytes`, `draft_kv_bytes_per_token`: what its weights and its KV cache take. `model`: where vLLM loads it
    from.

    "ngram" has no drafter: drafts follow the last place of the text that ends as the text does now, in the longest
    `prompt_lookup_min` to `prompt_lookup_max` tokens (None: vLLM's 5). `match_rate`: of the steps of a request, those
    in which there is such a place. A step costs one look-up, `draft_pass_ms` and `draft_token_ms` for each token of
    its requests (vllm/v1/spec_decode/ngram_proposer.py).
    """

    method: str
    num_speculative_tokens: int
    acceptance: float
    draft_pass_ms: float = 0.0
    draft_token_ms: float = 0.0
    draft_bytes: float = 0.0
    draft_kv_bytes_per_token: float = 0.0
    match_rate: float = 1.0
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        checks.choice("engine.speculation.method", self.method, DRAFT_METHODS)
        given = (name for name in LOOK_UPS if getattr(self, name) is not None)
        for name in ("num_speculative_tokens", *given):
            checks.keep_integer(self, f"engine.speculation.{name}", low=1, high=MOST_DRAFTS)
        for item in fields(self)[2:-3]:
            high = 1.0 if item.name in ("acceptance", "match_rate") else 1e15
            checks.keep_real(self, f"engine.speculation.{item.name}", low=0.0, high=high)
        if not self.looks_up and (self.match_rate < 1.0 or self.prompt_lookup_min or self.prompt_lookup_max):
            rule = f"Expected match_rate and prompt_lookup_… with the method ngram alone, got {shown(self.method)}."
            raise ValidationError(rule)

    @property
    def looks_up(self) -> bool:
        """Whether drafts are looked up in the text, without a drafter."""
        return self.method == "ngram"

    @property
    def reserved_tokens(self) -> int:
        """Tokens beyond those of a step that the KV cache has room for: the drafter's (`num_lookahead_tokens`)."""
        return 0 if self.looks_up else self.num_speculative_tokens

    @property
    def reads_ahead(self) -> bool:
        """Whether the drafter's KV of a token depends on the token after it (`needs_eagle_block_drop` in vLLM)."""
        return self.method not in ("draft_model", "ngram")

    def check_fits(self, max_num_batched_tokens: int) -> None:
        """Raises `ValidationError`: a step does not hold a request with its drafts."""
        most = max_num_batched_tokens - 2
        checks.integer("num_speculative_tokens", self.num_speculative_tokens, low=1, high=most)

    @classmethod
    def parse(cls, text: str) -> SpeculationSpec:
        """From a text as "eagle3:num_speculative_tokens=3,acceptance=0.6".

        Raises `ValidationError`: it has another form, or a value breaks a rule.
        """
        method, _, rest = text.partition(":")
        given = dict(part.partition("=")[::2] for part in rest.split(","))
        kinds: dict[str, type] = {"num_speculative_tokens": int, "model": str, **dict.fromkeys(LOOK_UPS, int)}
        known = {item.name for item in fields(cls)} - {"method"}
        try:
            values = {key: kinds.get(key, float)(value) for key, value in given.items()}
        except ValueError:
            values = {}
        if not {"num_speculative_tokens", "acceptance"} <= values.keys() <= known:
            raise ValidationError(
                "Expected speculation as METHOD:num_speculative_tokens=N,acceptance=SHARE and perhaps "
                f"{', '.join(sorted(known - {'num_speculative_tokens', 'acceptance'}))}, got {shown(text)}."
            )
        return cls(method, **values)

    def __str__(self) -> str:
        """What `parse` reads."""
        given = ((item.name, getattr(self, item.name), item.default) for item in fields(self)[1:])
        return f"{self.method}:{','.join(f'{name}={value}' for name, value, default in given if value != default)}"

    @property
    def config(self) -> dict[str, object]:
        """vLLM's `--speculative-config`."""
        given = {
            "method": self.method,
            "model": self.model,
            "num_speculative_tokens": self.num_speculative_tokens,
            **{name: getattr(self, name) for name in LOOK_UPS},
        }
        return {key: value for key, value in given.items() if value is not None}
