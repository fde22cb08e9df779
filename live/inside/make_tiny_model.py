"""Write a tiny Llama without weights, a word-level tokenizer and LoRA adapters in PEFT format.

Runs in vLLM's environment, which has `tokenizers` and `safetensors`:

    python make_tiny_model.py '{"directory": "tiny", "hidden": 256, "layers": 2, …, "ranks": [8, 16]}'
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def write_model(directory: Path, vocabulary: int) -> None:
    """Write `config.json` and the tokenizer; vLLM makes the weights at start with `--load-format dummy`."""
    shutil.copytree(Path(__file__).with_name("tiny-llama"), directory, dirs_exist_ok=True)
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def write_adapter(directory: Path, spec: dict[str, Any], rank: int) -> None:
    """Write one adapter on all attention and feed-forward projections, with random weights of a fixed seed."""
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
    config = json.loads(Path(__file__).with_name("adapter_config.json").read_text())
    config |= {"r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    """Write all files that the JSON argument specifies."""
    spec = json.loads(sys.argv[1])
    root = Path(spec["directory"])
    if "vocabulary" in spec:
        write_model(root / "model", spec["vocabulary"])
    for rank in spec["ranks"]:
        write_adapter(root / "adapters" / f"rank-{rank}", spec, rank)


if __name__ == "__main__":
    main()
