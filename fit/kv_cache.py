"""The KV cache of a model on the GPUs of a data-parallel rank: bytes of a token, and what a request holds.

vLLM puts layers of a kind into groups of equal size, fills them up, and gives each group blocks of its own
(vllm/v1/core/kv_cache_utils.py of 0.32.0, `_get_kv_cache_groups_uniform_page_size`).
"""

from __future__ import annotations

import math

from packer.engine_spec import EngineSpec
from packer.fit.dimensions import ModelDimensions
from packer.kv_shape import HYBRID, KvShape

SIMILAR = 1.5  # Unless a kind has so many times the layers of the rarest, groups have the size of the most frequent.


def kv_cache(model: ModelDimensions, engine: EngineSpec, bytes_each: float) -> tuple[float, KvShape | None]:
    """Return the bytes of a token on all GPUs of a rank, and the shape; None: in proportion to the tokens.

    `bytes_each`: bytes of an element. A KV head is on one GPU, or on several if there are more GPUs than heads; a
    compressed cache is on each.
    """
    n = engine.tensor_parallel_size
    layer = bytes_each * model.kv_elements * (n if model.kv_rank else max(1.0, n / model.kv_heads))
    windowed = model.windowed_layers if engine.name != "vllm" or engine.release >= HYBRID else 0
    kinds = (model.attention_layers - windowed, windowed, model.state_layers)
    counts = [each for each in kinds if each]
    size = min(counts) if max(counts) >= SIMILAR * min(counts) else max(counts)
    whole, short, states = (math.ceil(each / size) for each in kinds)
    kept, block = 0.0, 0
    if states:
        # Blocks grow until they hold a state (vllm/platforms/interface.py, `update_block_size_for_backend`). A request
        # leaves half of its last one free.
        block = 16 * math.ceil(model.state_bytes / (16 * layer))
        kept = block * (states / whole + 0.5)
    # The oldest block also has tokens before the window, half a block in the mean.
    window = model.window + engine.block_size // 2 - 1 if short else 0
    shape = KvShape(window, short / (whole + short), kept, block)
    return layer * size * (whole + short), None if shape == KvShape() else shape
