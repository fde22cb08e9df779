"""The dimensions of a base model, from the `config.json` of its Hugging Face repository."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packer import checks
from packer.errors import FileFormatError, IncompatibleError, ValidationError, shown
from packer.io.documents import parse_json
from packer.io.files import read_text

DENSE_TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
"""Decoders with grouped-query attention and a gated MLP, of which the formulas below hold."""

TIED_BY_DEFAULT = ("gemma", "gemma2", "gemma3_text")
"""Their config leaves `tie_word_embeddings` out when it is true."""

EMBEDDING_LORA_TYPES = ("granite", "llama", "mistral", "phi3")
"""vLLM also reserves LoRA slots for the embedding and the output head of these (`embedding_modules`)."""

EXTRA_VOCABULARY = 256
"""Tokens that an adapter may add (vLLM's `lora_extra_vocab_size`)."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

BYTES = 2
"""Of a weight, bf16."""


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of a dense decoder with a gated MLP."""

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

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights in bf16."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        norms = 2 * self.hidden
        if self.kind in ("gemma2", "gemma3_text"):
            norms *= 2
        if self.kind == "qwen2":
            norms += (self.heads + 2 * self.kv_heads) * self.head_dim  # biases of q, k and v
        if self.kind in ("qwen3", "gemma3_text"):
            norms += 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + norms
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return float(BYTES * (self.layers * layer + embeddings + self.hidden))

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token; a sliding window is not counted on."""
        return float(2 * BYTES * self.layers * self.kv_heads * self.head_dim)

    @property
    def lora_bytes_per_rank(self) -> float:
        """Bytes of an adapter of all linear layers, per unit of rank: A is rank × in, B is out × rank."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * (self.hidden + queries) + 2 * (self.hidden + keys)
        return float(BYTES * self.layers * (attention + 3 * (self.hidden + self.intermediate)))

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


def read_model_config(path: str | os.PathLike[str], *, name: str | None = None) -> ModelDimensions:
    """The dimensions in a `config.json`.

    Raises
    ------
    FileFormatError
        It can't be read, or a value is missing or makes no sense; names the key.
    IncompatibleError
        The estimate doesn't know this kind of model (mixture of experts, quantised weights, …).
    """
    data = parse_json(read_text(path), path)
    if not isinstance(data, dict):
        raise FileFormatError(f"expected the JSON object of a model's config, got {shown(data)}.", path=path)
    config = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    kind = config.get("model_type")
    _refuse_unknown(config, kind, path)
    hidden, heads = _size(config, "hidden_size", path), _size(config, "num_attention_heads", path)
    return ModelDimensions(
        name=name or _name(data, path),
        kind=str(kind),
        layers=_size(config, "num_hidden_layers", path),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size", path),
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", path, default=heads),
        head_dim=_size(config, "head_dim", path, default=max(1, hidden // heads)),
        vocabulary=_size(config, "vocab_size", path),
        tied=_flag(config, "tie_word_embeddings", path, default=kind in TIED_BY_DEFAULT),
        max_model_len=_size(config, "max_position_embeddings", path),
        repository=_repository(data),
    )


def _repository(config: dict[str, Any]) -> str | None:
    """The Hugging Face repository that the config names, if it names one."""
    said = config.get("_name_or_path")
    return said if isinstance(said, str) and _REPOSITORY.fullmatch(said) else None


def _refuse_unknown(config: dict[str, Any], kind: object, path: str | os.PathLike[str]) -> None:
    experts = [key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)]
    if experts:
        raise IncompatibleError(
            f"{os.fspath(path)}: {shown(kind)} is a mixture of experts ({experts[0]}), which the estimate "
            "does not model. Calibrate a profile on a server instead."
        )
    if config.get("quantization_config"):
        raise IncompatibleError(
            f"{os.fspath(path)}: the weights are quantised, which the estimate does not model. Calibrate a "
            "profile on a server instead."
        )
    if kind not in DENSE_TYPES:
        raise IncompatibleError(
            f"{os.fspath(path)}: expected model_type to be one of {', '.join(DENSE_TYPES)}, "
            f"got {shown(kind)}."
        )


def _size(
    config: dict[str, Any], key: str, path: str | os.PathLike[str], *, default: int | None = None
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise FileFormatError("this key is missing.", path=path, key=key)
    try:
        return checks.integer(key, value, low=1, high=10**8)
    except ValidationError as error:
        raise FileFormatError(str(error), path=path) from None


def _flag(config: dict[str, Any], key: str, path: str | os.PathLike[str], *, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise FileFormatError(f"expected true or false, got {shown(value)}.", path=path, key=key)
    return value


def _name(config: dict[str, Any], path: str | os.PathLike[str]) -> str:
    """What the model is called: as the config says, else after the folder or file."""
    said = config.get("_name_or_path")
    if isinstance(said, str) and said.strip(" /."):
        return said.rstrip("/").rpartition("/")[2].lower()[:80]
    file = Path(path).resolve()
    return (file.parent.name if file.name == "config.json" else file.stem).lower()[:80] or "model"
