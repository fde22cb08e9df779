"""The tiny model for servers on the CPU: what it is, how big, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packer.errors import LiveError
from packer.profile import EngineSpec, GpuSpec, ModelSpec
from packer.twin.live import inside
from packer.twin.live.launch import Emulation, Launch

RANKS = (8, 16, 32, 64)


@dataclass(frozen=True)
class TinyModel:
    """A Llama small enough for one CPU core: steps take 2 to 20 ms, as a large one's on a GPU."""

    hidden: int = 256
    intermediate: int = 512
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    vocabulary: int = 1024
    max_model_len: int = 256

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, bfloat16."""
        return 2 * 2 * self.layers * self.hidden // self.heads * self.kv_heads

    @property
    def lora_bytes_per_rank(self) -> int:
        """A and B of the seven projections of every layer, bfloat16."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * (self.hidden + self.hidden) + 2 * (self.hidden + kv)
        feed_forward = 3 * (self.hidden + self.intermediate)
        return 2 * self.layers * (attention + feed_forward)

    @property
    def weights_bytes(self) -> int:
        """Projections and the two embedding tables, bfloat16."""
        kv = self.hidden // self.heads * self.kv_heads
        layer = 2 * self.hidden**2 + 2 * self.hidden * kv + 3 * self.hidden * self.intermediate
        return 2 * (self.layers * layer + 2 * self.vocabulary * self.hidden)


def write_tiny_model(python: str, folder: Path, model: TinyModel, ranks: tuple[int, ...] = RANKS) -> None:
    """Write `model/` and `adapters/rank-N/` below `folder` with vLLM's interpreter.

    Raises `LiveError`: the interpreter lacks `tokenizers` or `safetensors`, or cannot write there.
    """
    write_with(python, {"directory": str(folder), "ranks": ranks} | asdict(model), "The tiny model")


def write_with(python: str, spec: dict[str, Any], what: str) -> None:
    """Run `make_tiny_model.py` with vLLM's interpreter; raises LiveError, which names `what`, if it fails."""
    script = Path(inside.__file__).with_name("make_tiny_model.py")
    command = [python, str(script), json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveError(f"{what} could not be written: {done.stderr.strip()[-500:]}")


KV_BUDGET_BYTES = 20_000_000.0


def tiny_launch(python: str, version: str, model: TinyModel) -> Launch:
    """How to start the tiny model; server and client on different cores where there are two.

    The CPU back end takes the KV cache's size as given: the GPU's rule, by which slots come out of the same memory,
    is emulated.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    server, client = (cores[:1], cores[1:2]) if len(cores) > 1 else ([], [])
    lora_bytes = float(model.lora_bytes_per_rank)
    spec = ModelSpec("tiny-llama", float(model.weights_bytes), float(model.kv_bytes_per_token), lora_bytes)
    return Launch(
        name="cpu/tiny-llama",
        model="model",
        adapter_path="adapters/rank-{rank}",
        engine=EngineSpec("vllm", version, model.max_model_len, 512, 64, block_size=32),
        model_spec=spec,
        gpu=GpuSpec("one CPU core, emulated slot memory", KV_BUDGET_BYTES),
        python=python,
        arguments=(
            *("--load-format", "dummy", "--enforce-eager"),
            *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        ),
        environment={"OMP_NUM_THREADS": "1"},
        emulation=Emulation(KV_BUDGET_BYTES, lora_bytes),
        server_cores=tuple(server),
        client_cores=tuple(client),
        api_cores=tuple(client),
        token_ids=(4, model.vocabulary),
        startup_timeout_s=300.0,
    )
