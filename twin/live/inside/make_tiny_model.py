"""Write a tiny Llama without weights, a word-level tokenizer and LoRA adapters in PEFT format.

Runs in vLLM's environment, which has `tokenizers` and `safetensors`:

    python make_tiny_model.py '{"directory": "tiny", "hidden": 256, "layers": 2, …, "ranks": [8, 16]}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def write_model(directory: Path, spec: dict[str, Any]) -> None:
    """`config.json` and the tokenizer; the weights are made at start by `--load-format dummy`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec["hidden"],
        "intermediate_size": spec["intermediate"],
        "num_hidden_layers": spec["layers"],
        "num_attention_heads": spec["heads"],
        "num_key_value_heads": spec["kv_heads"],
        "vocab_size": spec["vocabulary"],
        "max_position_embeddings": spec["max_model_len"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), spec["vocabulary"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec["max_model_len"],
        **names,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def write_adapter(directory: Path, spec: dict[str, Any], rank: int) -> None:
    """One adapter on every attention and feed-forward projection, weights random but the same every time."""
    directory.mkdir(parents=True, exist_ok=True)
    hidden, inner = spec["hidden"], spec["intermediate"]
    head = spec.get("head_dim", hidden // spec["heads"])
    query, kv = head * spec["heads"], head * spec["kv_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    rng = np.random.default_rng(rank)
    tensors = {}
    for layer in range(spec["layers"]):
        for module, (n_in, n_out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, 0.01, (rank, n_in)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.01, (n_out, rank)).astype(np.float32)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(module.split(".")[1] for module in shapes),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    """Everything that the JSON argument names."""
    spec = json.loads(sys.argv[1])
    root = Path(spec["directory"])
    if "vocabulary" in spec:
        write_model(root / "model", spec)
    for rank in spec["ranks"]:
        write_adapter(root / "adapters" / f"rank-{rank}", spec, rank)


if __name__ == "__main__":
    main()
