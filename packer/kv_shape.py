"""The KV cache of a request whose layers do not all keep all of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packer import checks
from packer.arrays import FloatArray, IntArray

HYBRID = (0, 9)  # vLLM 0.9.1, from which layers with a window drop tokens; before, all layers keep all tokens.
MOST_SHARE = 0.999  # Largest share of a token's KV cache in layers with a window.


@dataclass(frozen=True, slots=True)
class KvShape:
    """The KV cache that a request holds where it is not in proportion to its tokens. Unit: what a token takes at first.

    `windowed_share` of that is in layers that keep the last `window` tokens only. `request_tokens`: what each request
    holds beside its tokens, for the states of layers without attention. `state_block`: tokens of a block that holds a
    state; prefixes are found in multiples of it (0: in blocks of the engine).
    """

    window: int = 0
    windowed_share: float = 0.0
    request_tokens: float = 0.0
    state_block: int = 0

    def __post_init__(self) -> None:
        checks.keep_integer(self, "model.kv_shape.window", low=0)
        checks.keep_real(self, "model.kv_shape.windowed_share", low=0.0, high=MOST_SHARE)
        checks.keep_real(self, "model.kv_shape.request_tokens", low=0.0, high=1e9)
        checks.keep_integer(self, "model.kv_shape.state_block", low=0)

    def held(self, tokens: float, ahead: int = 0) -> float:
        """Return what a request of `tokens` tokens holds. `ahead`: tokens of a step, which layers with a window keep,
        too (vllm/v1/kv_cache_interface.py of 0.32.0, `SlidingWindowSpec.max_admission_blocks_per_request`)."""
        return tokens - self.windowed_share * max(tokens - self.window - ahead, 0) + self.request_tokens

    def longest(self, held: float, ahead: int = 0) -> int:
        """Return the tokens of the longest request that holds no more than `held`, the inverse of `held`."""
        tokens = held - self.request_tokens
        further = max(tokens - self.window - ahead, 0)
        return max(0, int(tokens + further * self.windowed_share / (1.0 - self.windowed_share)))

    def held_by_decodes(self, prompt: FloatArray | IntArray, output: FloatArray | IntArray) -> FloatArray:
        """Return the sum of `held` over the decodes of requests of these lengths, any common shape."""

        def up_to(tokens: FloatArray | IntArray) -> FloatArray:
            further = np.maximum(tokens - self.window, 0.0)
            return np.asarray(0.5 * (tokens.astype(np.float64) ** 2 - self.windowed_share * further**2))

        return np.asarray(up_to(prompt + output) - up_to(prompt) + self.request_tokens * output)
