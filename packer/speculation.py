"""Speculative decoding of a server: number of draft tokens, share of them that is accepted, cost of the drafter."""

from __future__ import annotations

from dataclasses import dataclass, fields

from packer import checks
from packer.errors import ValidationError, shown

MOST_DRAFTS = 64
DRAFT_METHODS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of speculative decoding that always propose a fixed number of draft tokens, if they propose any."""


@dataclass(frozen=True, slots=True)
class SpeculationSpec:
    """Speculative decoding, by vLLM's names (`--speculative-config`).

    `acceptance`: accepted / proposed draft tokens (`vllm:spec_decode_num_accepted_tokens` / `num_draft_tokens`), for
    adapters without their own value (`Adapter.acceptance`). The drafter runs without adapters. Each step runs
    `num_speculative_tokens` passes of the drafter, which take `draft_pass_ms` each plus `draft_token_ms` per token.
    `draft_bytes`, `draft_kv_bytes_per_token`: memory of the drafter's weights and of its KV cache. `model`: the
    drafter's path or repository, without which vLLM starts mtp only.
    """

    method: str
    num_speculative_tokens: int
    acceptance: float
    draft_pass_ms: float = 0.0
    draft_token_ms: float = 0.0
    draft_bytes: float = 0.0
    draft_kv_bytes_per_token: float = 0.0
    model: str | None = None

    def __post_init__(self) -> None:
        checks.choice("engine.speculation.method", self.method, DRAFT_METHODS)
        checks.keep_integer(self, "engine.speculation.num_speculative_tokens", low=1, high=MOST_DRAFTS)
        for item in fields(self)[2:-1]:
            high = 1.0 if item.name == "acceptance" else 1e15
            checks.keep_real(self, f"engine.speculation.{item.name}", low=0.0, high=high)

    @property
    def reads_ahead(self) -> bool:
        """Whether the drafter's KV of a token depends on the token after it (`needs_eagle_block_drop` in vLLM)."""
        return self.method != "draft_model"

    @classmethod
    def parse(cls, text: str) -> SpeculationSpec:
        """Parse "eagle3:num_speculative_tokens=3,acceptance=0.6"; raises `ValidationError`."""
        method, _, rest = text.partition(":")
        parts = [part.partition("=")[::2] for part in rest.split(",")]
        given = dict(parts)
        kinds: dict[str, type] = {"num_speculative_tokens": int, "model": str}
        known = {item.name for item in fields(cls)} - {"method"}
        try:
            values = {key: kinds.get(key, float)(value) for key, value in given.items()}
        except ValueError:
            values = {}
        if len(given) < len(parts) or not {"num_speculative_tokens", "acceptance"} <= values.keys() <= known:
            raise ValidationError(
                "Expected speculation as METHOD:num_speculative_tokens=N,acceptance=SHARE and perhaps "
                f"{', '.join(sorted(known - {'num_speculative_tokens', 'acceptance'}))}, got {shown(text)}."
            )
        return cls(method, **values)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        given = ((item.name, getattr(self, item.name), item.default) for item in fields(self)[1:])
        return f"{self.method}:{','.join(f'{name}={value}' for name, value, default in given if value != default)}"

    @property
    def config(self) -> dict[str, object]:
        """vLLM's `--speculative-config`. Raises `ValidationError`: vLLM would not start, since `model` is not given."""
        if self.model is None and self.method != "mtp":
            rule = "Expected a setting model (path or repository of the drafter) of speculation"
            raise ValidationError(f"{rule}: vLLM does not start {self.method} without it; got {str(self)!r}.")
        names = ("method", "model", "num_speculative_tokens")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
