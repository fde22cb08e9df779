"""The dimensions of a base model, from the `config.json` of its Hugging Face repository."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from packer import checks
from packer.errors import FileFormatError, IncompatibleError, located, reader, shown
from packer.fit.dimensions import BYTES, KINDS, ModelDimensions
from packer.fit.quantization import of_experts, weights_of_config
from packer.io.documents import parse_json
from packer.io.files import read_text

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERT_SIZES = ("moe_intermediate_size", "intermediate_size")


@reader
def read_model_config(path: str | os.PathLike[str]) -> ModelDimensions:
    """Read dimensions in a `config.json`; raises `FileFormatError`, or `IncompatibleError` for unknown kinds."""
    data = parse_json(read_text(path))
    if not isinstance(data, dict):
        raise FileFormatError(f"expected the JSON object of a model's config, got {shown(data)}.")
    config = data["text_config"] if isinstance(data.get("text_config"), dict) else data
    kind = _kind(config, path)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    layers = _size(config, "num_hidden_layers")
    said = data.get("_name_or_path")
    tied = data.get("tie_word_embeddings", config.get("tie_word_embeddings", kind in KINDS["tied_by_default"]))
    if not isinstance(tied, bool):
        raise FileFormatError(f"expected true or false, got {shown(tied)}.", key="tie_word_embeddings")
    stored = data.get("quantization_config", config.get("quantization_config"))
    bits, quantization = weights_of_config(stored, path)
    mlp = _mlp(config, kind, layers)
    if mlp.get("experts"):
        quantization = of_experts(stored, quantization)
    return ModelDimensions(
        name=_name(data, path), kind=kind, layers=layers, hidden=hidden, heads=heads, tied=tied,
        kv_heads=_size(config, "num_key_value_heads", default=heads, high=heads),
        vocabulary=_size(config, "vocab_size"), max_model_len=_longest(config, kind),
        repository=said if isinstance(said, str) and _REPOSITORY.fullmatch(said) else None, weight_bits=bits,
        quantization=quantization, biases=kind in KINDS["biased"] or config.get("attention_bias") is True, **mlp,
        **_attention(config, kind, layers, hidden, heads),
    )  # fmt: skip


def _kind(config: dict[str, Any], path: str | os.PathLike[str]) -> str:
    """Return the kind of model; raises `IncompatibleError` if it is not supported."""
    kind = config.get("model_type")
    if isinstance(kind, str) and (reason := KINDS["refused"].get(kind)):
        raise IncompatibleError(f"{os.fspath(path)}: a {kind} model cannot be estimated: {reason}.")
    if kind not in (known := (*KINDS["dense"], *KINDS["moe"])):
        rule = f"expected model_type to be one of {', '.join(sorted(known))}"
        near = 'the nearest of them ("llama": any dense decoder with a gated MLP) in a copy of the file'
        said = f"{os.fspath(path)}: {rule}, got {shown(kind)}."
        raise IncompatibleError(f"{said} For an estimate of its kind, give {near}.")
    return str(kind)


def _longest(config: dict[str, Any], kind: str) -> int:
    """Return the longest context, tokens. Source: vllm/config/model.py, `_get_and_verify_max_len`: linear and dynamic
    scaling multiply `max_position_embeddings`, yarn the length that it gives; that of Gemma 3 is multiplied already."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    said = rope if isinstance(rope, dict) and kind != "gemma3_text" else {}
    how, longest = said.get("rope_type", said.get("type")), _size(config, "max_position_embeddings")
    if how == "yarn":
        longest = _size(said, "original_max_position_embeddings", default=longest)
    factor = said.get("factor") if how in ("linear", "dynamic", "yarn") else None
    with located():
        factor = 1.0 if factor is None else checks.real("factor", factor, low=1.0, high=1000.0)
    return int(factor * longest)


def _mlp(config: dict[str, Any], kind: str, layers: int) -> dict[str, Any]:
    key = next((key for key in _EXPERTS if config.get(key)), None)
    if key is None:
        return {"intermediate": _size(config, "intermediate_size")}
    size = _size(config, next((each for each in _EXPERT_SIZES if config.get(each)), "intermediate_size"))
    shared = _size(config, "shared_expert_intermediate_size", default=0, low=0)
    if config.get("n_shared_experts"):
        shared = size * _size(config, "n_shared_experts")
    dense = _size(config, "first_k_dense_replace", default=0, low=0, high=layers)
    experts = _size(config, key)
    wide = _size(config, "intermediate_size", default=0, low=0) if dense else 0
    if kind == "llama4_text":
        shared = size
        step = _size(config, "interleave_moe_layer_step", default=1)
        dense, wide = layers - layers // step, _size(config, "intermediate_size_mlp", default=size)
    return {
        "intermediate": size,
        "experts": experts,
        "experts_per_token": _size(config, "num_experts_per_tok", high=experts),
        "shared_intermediate": shared,
        "dense_layers": dense,
        "dense_intermediate": wide if dense else 0,
    }


def _attention(config: dict[str, Any], kind: str, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    found: dict[str, Any] = {"head_dim": _size(config, "head_dim", default=max(1, hidden // heads))}
    if config.get("kv_lora_rank"):
        rope = _size(config, "qk_rope_head_dim")
        found |= {
            "head_dim": _size(config, "qk_nope_head_dim") + rope,
            "rope_dim": rope,
            "kv_rank": _size(config, "kv_lora_rank"),
            "query_rank": _size(config, "q_lora_rank", default=0, low=0),
            "value_dim": _size(config, "v_head_dim"),
        }
    types = config.get("layer_types")
    types = [each for each in types if isinstance(each, str)] if isinstance(types, list) else []
    if types and len(types) != layers:
        raise FileFormatError(f"expected a type for each of the {layers} layers, got {len(types)}.", key="layer_types")
    windowed = sum("sliding" in each or "chunked" in each for each in types)
    if not types and kind in KINDS["shares_window"]:
        windowed = layers - layers // KINDS["shares_window"][kind]
    if kind == "llama4_text" and not types:
        windowed = layers - layers // 4
    key = "attention_chunk_size" if kind == "llama4_text" else "sliding_window"
    if windowed and config.get(key) is not None:
        found |= {"window": _size(config, key), "windowed_layers": windowed}
    states = sum("linear" in each for each in types)
    if not states and config.get("full_attention_interval") and config.get("linear_num_value_heads"):
        states = layers - layers // _size(config, "full_attention_interval")
    if states:
        keys = _size(config, "linear_num_key_heads") * _size(config, "linear_key_head_dim")
        value_heads = _size(config, "linear_num_value_heads")
        values = value_heads * _size(config, "linear_value_head_dim")
        kernel = _size(config, "linear_conv_kernel_dim", default=4)
        each = 4 if config.get("mamba_ssm_dtype") == "float32" else BYTES
        # in_proj_qkvz and in_proj_ba of a gated delta net (vllm/model_executor/models/qwen3_next.py)
        found |= {
            "state_layers": states,
            "state_in": 2 * keys + 2 * values + 2 * value_heads,
            "state_out": values,
            # vllm/model_executor/layers/mamba/mamba_utils.py, `gated_delta_net_state_shape`
            "state_bytes": each * values * _size(config, "linear_key_head_dim")
            + BYTES * (2 * keys + values) * (kernel - 1),
            "gated_attention": True,
        }
    return found


def _size(config: dict[str, Any], key: str, *, default: int | None = None, low: int = 1, high: int = 10**8) -> int:
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise FileFormatError("this key is missing.", key=key)
    with located():
        return checks.integer(key, value, low=low, high=high)


def _name(data: dict[str, Any], path: str | os.PathLike[str]) -> str:
    """Return the model's name: `_name_or_path` of the config, else the name of the folder or file."""
    said = data.get("_name_or_path")
    if isinstance(said, str) and said.strip(" /."):
        return said.rstrip("/").rpartition("/")[2].lower()[:80]
    file = Path(path).resolve()
    return (file.parent.name if file.name == "config.json" else file.stem).lower()[:80] or "model"
