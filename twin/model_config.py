"""The dimensions of a base model, from the `config.json` of its Hugging Face repository."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packer import checks
from packer.errors import FileFormatError, IncompatibleError, ValidationError, reader, shown
from packer.io.documents import parse_json
from packer.io.files import read_text

DENSE_TYPES = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Decoders with grouped-query attention and a gated MLP, of which the formulas below hold."""

TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
"""Their config leaves `tie_word_embeddings` out when it is true."""

EMBEDDING_LORA_TYPES = ("granite", "llama", "mistral", "phi3")
"""vLLM also reserves LoRA slots for the embedding and the output head of these (`embedding_modules`)."""

EXTRA_VOCABULARY = 256
"""Tokens that an adapter may add (vLLM's `lora_extra_vocab_size`)."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

MOE_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
"""Decoders whose MLP is a mixture of gated experts, with the same attention."""

BYTES = 2
"""Of a weight, bf16."""

GROUP = 128
"""Weights that share a 16-bit scale where the config of quantised weights does not say how many."""

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of a decoder with a gated MLP, dense or a mixture of experts."""

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
    experts: int = 0
    """Of each layer; 0: a dense MLP of `intermediate`, with experts each of them is so large."""
    experts_per_token: int = 0
    shared_intermediate: int = 0
    """Of the expert that every token takes, 0 without."""
    weight_bits: float = 8.0 * BYTES
    """Of a weight of the linear layers, with the scales of quantised ones; embeddings are in bf16."""

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        norms = 2 * self.hidden
        if self.kind in ("gemma2", "gemma3_text"):
            norms *= 2
        if self.kind == "qwen2":
            norms += (self.heads + 2 * self.kv_heads) * self.head_dim  # biases of q, k and v
        if self.kind in ("qwen3", "gemma3_text"):
            norms += 2 * self.head_dim
        mlp = 3 * self.hidden * ((self.experts or 1) * self.intermediate + self.shared_intermediate)
        linear = self.layers * (attention + mlp)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        others = self.layers * (norms + self.hidden * self.experts) + embeddings + self.hidden
        return float(self.weight_bits / 8.0 * linear + BYTES * others)

    @property
    def active_bytes(self) -> float:
        """Bytes in bf16 of the weights that a token is multiplied with: its arithmetic."""
        return replace(self, experts=self.experts_per_token, weight_bits=8.0 * BYTES).weights_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token; a sliding window is not counted on."""
        return float(2 * BYTES * self.layers * self.kv_heads * self.head_dim)

    @property
    def lora_bytes_per_rank(self) -> float:
        """Bytes of an adapter of all linear layers, per unit of rank: A is rank × in, B is out × rank.

        Of a mixture of experts only attention has LoRA.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        mlp = 0 if self.experts else 3 * (self.hidden + self.intermediate)
        return float(BYTES * self.layers * (attention + mlp))

    @property
    def slot_bytes_per_rank(self) -> float:
        """Bytes of one of vLLM's slots, per unit of `max_lora_rank`."""
        if self.kind not in EMBEDDING_LORA_TYPES:
            return self.lora_bytes_per_rank
        ends = self.vocabulary + EXTRA_VOCABULARY + self.hidden
        return self.lora_bytes_per_rank + 2 * BYTES * ends

    @property
    def slot_bytes(self) -> float:
        """Bytes of one of vLLM's slots that don't depend on the rank: rows for added tokens."""
        if self.kind not in EMBEDDING_LORA_TYPES:
            return 0.0
        return float(2 * BYTES * EXTRA_VOCABULARY * self.hidden)


@reader
def read_model_config(path: str | os.PathLike[str]) -> ModelDimensions:
    """The dimensions in a `config.json`.

    Raises `FileFormatError`: it can't be read, or a value is missing or makes no sense; names the key;
    `IncompatibleError`: the estimate doesn't support this kind of model or quantisation.
    """
    data = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise FileFormatError(f"expected the JSON object of a model's config, got {shown(data)}.")
    config = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    kind = config.get("model_type")
    if kind not in (known := (*DENSE_TYPES, *MOE_TYPES)):
        listed = ", ".join(known)
        raise IncompatibleError(
            f"{os.fspath(path)}: expected model_type to be one of {listed}, got {shown(kind)}."
        )
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    key = next((key for key in _EXPERTS if config.get(key)), None)
    experts = 0 if key is None else _size(config, key)
    said = data.get("_name_or_path")
    tied = config.get("tie_word_embeddings", kind in TIED_BY_DEFAULT)
    if not isinstance(tied, bool):
        rule = f"expected true or false, got {shown(tied)}."
        raise FileFormatError(rule, key="tie_word_embeddings")
    return ModelDimensions(
        name=_name(data, path),
        kind=str(kind),
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_size(
            config,
            "moe_intermediate_size" if experts and "moe_intermediate_size" in config else "intermediate_size",
        ),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", default=heads),
        head_dim=_size(config, "head_dim", default=max(1, hidden // heads)),
        vocabulary=_size(config, "vocab_size"),
        tied=tied,
        max_model_len=_size(config, "max_position_embeddings"),
        repository=said if isinstance(said, str) and _REPOSITORY.fullmatch(said) else None,
        experts=experts,
        experts_per_token=_size(config, "num_experts_per_tok") if experts else 0,
        shared_intermediate=(
            _size(config, "shared_expert_intermediate_size")
            if experts and config.get("shared_expert_intermediate_size")
            else 0
        ),
        weight_bits=_weight_bits(config, path),
    )


def _weight_bits(config: dict[str, Any], path: str | os.PathLike[str]) -> float:
    """Bits of a weight of the linear layers with its share of the scales.

    Raises `IncompatibleError`: the config does not say how many bits quantised weights have, in a way that is known.
    """
    given = config.get("quantization_config")
    if not given:
        return 8.0 * BYTES
    method = str(given.get("quant_method", "")) if isinstance(given, dict) else ""
    bits = None
    if method in ("fp8", "fbgemm_fp8"):
        bits = 8
    elif method in ("gptq", "awq"):
        bits = given.get("bits")
    elif method == "bitsandbytes":
        bits = 4 if given.get("load_in_4bit") else 8 if given.get("load_in_8bit") else None
    elif method == "compressed-tensors":
        groups = given.get("config_groups")
        weights = [each.get("weights") or {} for each in (groups or {}).values() if isinstance(each, dict)]
        bits = weights[0].get("num_bits") if weights else None
    if bits not in (4, 8):
        raise IncompatibleError(
            f"{os.fspath(path)}: expected quantization_config of fp8, gptq, awq, bitsandbytes or compressed-tensors "
            f"with 4 or 8 bits, got {shown(given)}."
        )
    size = given.get("group_size", GROUP)
    grouped = size if isinstance(size, int) and size > 0 else GROUP
    return float(bits) + (16.0 / grouped if bits == 4 else 0.0)


def _size(config: dict[str, Any], key: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise FileFormatError("this key is missing.", key=key)
    try:
        return checks.integer(key, value, low=1, high=10**8)
    except ValidationError as error:
        raise FileFormatError(str(error)) from None


def _name(config: dict[str, Any], path: str | os.PathLike[str]) -> str:
    """What the model is called: as the config says, else after the folder or file."""
    said = config.get("_name_or_path")
    if isinstance(said, str) and said.strip(" /."):
        return said.rstrip("/").rpartition("/")[2].lower()[:80]
    file = Path(path).resolve()
    return (file.parent.name if file.name == "config.json" else file.stem).lower()[:80] or "model"
