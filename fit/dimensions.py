"""Dimensions of a decoder, and the bytes of its weights, KV cache and adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from packer.io.shipped import table

BYTES = 2  # Bytes of a bf16 weight.
KINDS = table("packer.fit", "model_kinds.toml")
LORA_MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""Linear layers of a decoder as vLLM packs them, each with LoRA kernels of its own."""

MXFP4_BLOCK = 256  # vLLM pads the intermediate size of MXFP4 experts to multiples of it (layers/quantization/mxfp4.py).

QUANTIZATIONS = table("packer.fit", "quantization.toml")
EXPERTS_ONLY = tuple(name for name, row in QUANTIZATIONS.items() if row.get("experts_only"))
"""Quantisations that apply to the experts only."""


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of a decoder with a gated MLP, dense or a mixture of experts.

    `intermediate`: size of the MLP, or of each expert. `tied`: the output head is the embedding. `biases`: queries,
    keys and values have biases. `weight_bits`: bits of a weight of the linear layers with its share of the scales;
    embeddings are in bf16. `quantization`: vLLM's name for the format of the linear layers; None: bf16.
    """

    name: str
    kind: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    max_model_len: int
    repository: str | None = None
    experts: int = 0  # Experts of each layer; 0: a dense MLP.
    experts_per_token: int = 0
    shared_intermediate: int = 0  # Size of the shared expert, which every token uses; 0 without one.
    weight_bits: float = 8.0 * BYTES
    quantization: str | None = None
    biases: bool = False
    dense_layers: int = 0  # Layers of a mixture of experts that have a dense MLP of `dense_intermediate` instead.
    dense_intermediate: int = 0
    window: int = 0
    windowed_layers: int = 0  # Layers whose attention sees the last `window` tokens only.
    state_layers: int = 0  # Layers without attention (gated delta nets, Mamba), with a state of fixed size per request.
    state_in: int = 0  # Outputs of the projections into a layer without attention.
    state_out: int = 0  # Inputs of the projection out of a layer without attention.
    state_bytes: float = 0.0  # State that a layer without attention keeps for each request.
    gated_attention: bool = False  # Queries are twice as wide: half of them gate the output (Qwen3-Next).
    kv_rank: int = 0  # Rank of compressed keys and values (DeepSeek's MLA, `kv_lora_rank`); 0 without compression.
    query_rank: int = 0
    rope_dim: int = 0  # Dimension of the part of a key that all heads share (MLA).
    value_dim: int = 0  # Dimension of a head's values if it differs from that of its keys (MLA).
    lora_modules: tuple[str, ...] = ()  # Modules with LoRA (`LORA_MODULES`); empty: all.

    @property
    def attention_layers(self) -> int:
        """Layers with a KV cache."""
        return self.layers - self.state_layers

    def splits_over(self, gpus: int) -> bool:
        """Whether so many GPUs divide the heads, and divide the KV heads or hold copies of each on as many GPUs
        (vllm/model_executor/layers/linear.py, `QKVParallelLinear`)."""
        return self.heads % gpus == 0 and max(gpus, self.kv_heads) % min(gpus, self.kv_heads) == 0

    def attention_shapes(self, gpus: int = 1) -> list[tuple[float, float, int]]:
        """Inputs, outputs and slices of an attention layer's matrices on one of `gpus` GPUs, as vLLM packs them. Each
        GPU has at least one KV head."""
        queries = self.heads * self.head_dim
        if self.kv_rank:
            values = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
            return [
                (self.hidden, self.query_rank + self.kv_rank + self.rope_dim, 2 if self.query_rank else 1),
                (self.query_rank or self.hidden, queries / gpus, 1),
                (self.kv_rank, values / gpus, 1),
                (self.heads * self.value_dim / gpus, self.hidden, 1),
            ]
        wide = queries * (2 if self.gated_attention else 1) + 2 * self.head_dim * max(self.kv_heads, gpus)
        slices = 1 if self.kind in KINDS["merged"] else 3
        return [(self.hidden, wide / gpus, slices), (queries / gpus, self.hidden, 1)]

    @property
    def stored_intermediate(self) -> int:
        """`intermediate` as the engine pads it."""
        block = MXFP4_BLOCK if self.quantization == "mxfp4" else 1
        return -(-self.intermediate // block) * block

    @property
    def expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_weights(self) -> float:
        """Weights of one expert."""
        return 3.0 * self.hidden * self.stored_intermediate if self.experts else 0.0

    @property
    def dense_weights(self) -> float:
        """Weights of the linear layers that every token uses: all except those of routed experts."""
        shared = 3.0 * self.hidden * self.shared_intermediate * self.expert_layers
        wide = self.dense_intermediate if self.experts else self.intermediate
        dense = 3.0 * self.hidden * wide * (self.layers - self.expert_layers)
        attention = self.attention_layers * sum(i * o for i, o, _ in self.attention_shapes())
        states = self.state_layers * self.hidden * (self.state_in + self.state_out)
        return attention + states + shared + dense

    @property
    def others(self) -> float:
        """Weights that are never quantised: norms, biases, routers, embeddings."""
        norms = (4 if self.kind in KINDS["sandwiched"] else 2) * self.hidden
        if self.biases:
            norms += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.kind in KINDS["normed_heads"]:
            norms += 2 * self.head_dim
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        routers = self.expert_layers * self.hidden * self.experts
        return float(self.layers * norms + routers + embeddings + self.hidden)

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights."""
        bits = 8.0 * BYTES if self.quantization in EXPERTS_ONLY else self.weight_bits
        return float(bits / 8.0 * self.dense_weights + BYTES * self.others + self.experts_bytes)

    @property
    def experts_bytes(self) -> float:
        """Bytes of the routed experts of all layers, without shared experts."""
        experts = self.expert_layers * self.experts * self.expert_weights
        if self.quantization == "mxfp4":  # blocks are padded, their scales are not; experts have biases
            scales = experts * self.intermediate / self.stored_intermediate / 4.0
            biases = self.expert_layers * self.experts * (2 * self.intermediate + self.hidden)
            return float(BYTES * biases + (4.0 * experts + scales) / 8.0)
        return float(self.weight_bits / 8.0 * experts)

    @property
    def active_bytes(self) -> float:
        """Bytes in bf16 of the weights that a token is multiplied with, as a measure of its arithmetic."""
        plain = replace(self, experts=self.experts_per_token, weight_bits=8.0 * BYTES, quantization=None)
        return plain.weights_bytes

    @property
    def kv_elements(self) -> int:
        """Elements of the KV cache for one token in one layer."""
        return self.kv_rank + self.rope_dim if self.kv_rank else 2 * self.kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token in all layers, in bf16."""
        return float(BYTES * self.attention_layers * self.kv_elements)

    def lora_shapes(self, gpus: int = 1) -> dict[str, tuple[float, float, int]]:
        """Inputs, outputs and slices of `LORA_MODULES` on one of `gpus` GPUs, for attention without compressed keys."""
        inner, slices = self.intermediate / gpus, 1 if self.kind in KINDS["merged"] else 2
        mlp = [(self.hidden, 2 * inner, slices), (inner, self.hidden, 1)]
        return dict(zip(LORA_MODULES, [*self.attention_shapes(gpus)[:2], *mlp], strict=True))

    def lora_bytes_on(self, gpus: int) -> float:
        """Bytes of an adapter per unit of rank on one of `gpus` GPUs, without `fully_sharded_loras`. A is rank ×
        inputs, B outputs × rank, on all linear layers or `lora_modules`. Mixtures of experts: attention only."""
        shapes = self.lora_shapes(gpus)
        chosen = [shapes[name] for name in self.lora_modules or (() if self.experts else LORA_MODULES[2:])]
        parts = _elements(chosen) * self.layers
        if not self.lora_modules:
            parts += _elements(self.attention_shapes(gpus)) * self.attention_layers
            parts += self.state_layers * (2 * self.hidden + (self.state_in + self.state_out) / gpus)
        return float(BYTES * parts)

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """Linear layers of attention, and of layers without it, by vLLM's names."""
        names: dict[str, list[str]] = KINDS["attention_modules"]
        own = LORA_MODULES[:2] if not self.kv_rank else names["compressed"]
        return (*own, *(names["states"] if self.state_layers else ()))

    @property
    def lora_bytes_per_rank(self) -> float:
        """Bytes of an adapter per unit of rank."""
        return self.lora_bytes_on(1)


def _elements(shapes: Iterable[tuple[float, float, int]]) -> float:
    """Elements of A and B per unit of rank."""
    return sum(slices * inputs + outputs for inputs, outputs, slices in shapes)
