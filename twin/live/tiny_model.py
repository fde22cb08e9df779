"""The tiny model for servers on the CPU: what it is, how big, and the launch file that starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packer.errors import LiveError
from packer.twin.live import inside

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

    Raises
    ------
    LiveError
        The interpreter lacks `tokenizers` or `safetensors`, or cannot write there.
    """
    write_with(python, {"directory": str(folder), "ranks": ranks} | asdict(model), "The tiny model")


def write_with(python: str, spec: dict[str, Any], what: str) -> None:
    """Run `make_tiny_model.py` with vLLM's interpreter; raises LiveError, which names `what`, if it fails."""
    script = Path(inside.__file__).with_name("make_tiny_model.py")
    command = [python, str(script), json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveError(f"{what} could not be written: {done.stderr.strip()[-500:]}")


LAUNCH_TEMPLATE = """\
# How to start the tiny model on the CPU: packer live calibrate --launch {file}
name = "cpu/tiny-llama"
python = {python}
adapter_path = "adapters/rank-{{rank}}"
arguments = ["--load-format", "dummy", "--enforce-eager", "--no-enable-prefix-caching",
             "--disable-uvicorn-access-log"]
server_cores = {server_cores}
client_cores = {client_cores}
api_cores = {client_cores}
token_ids = [4, {vocabulary}]
startup_timeout_s = 300.0

[model]
name = "tiny-llama"
path = "model"
weights_bytes = {weights}.0
kv_bytes_per_token = {kv}.0
lora_bytes_per_rank = {lora}.0

[gpu]
name = "one CPU core, emulated slot memory"
memory_bytes = {budget}.0

[engine]
version = "{version}"
max_model_len = {max_model_len}
max_num_batched_tokens = 512
max_num_seqs = 64
block_size = 32
gpu_memory_utilization = 0.9
dtype = "bfloat16"

# The CPU back end takes the KV cache's size as given; the GPU's rule (the slots come out of the same memory)
# is emulated: KV bytes = kv_budget_bytes - max_loras * max_lora_rank * slot_bytes_per_rank.
[emulation]
kv_budget_bytes = {budget}.0
slot_bytes_per_rank = {lora}.0

[environment]
OMP_NUM_THREADS = "1"
"""
KV_BUDGET_BYTES = 20_000_000


def launch_text(python: str, version: str, model: TinyModel) -> str:
    """The launch file for the tiny model; server and client on different cores where there are two."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    return LAUNCH_TEMPLATE.format(
        file="launch.toml",
        python=json.dumps(python),
        server_cores=[cores[0]] if len(cores) > 1 else [],
        client_cores=[cores[1]] if len(cores) > 1 else [],
        vocabulary=model.vocabulary,
        weights=model.weights_bytes,
        kv=model.kv_bytes_per_token,
        lora=model.lora_bytes_per_rank,
        budget=KV_BUDGET_BYTES,
        version=version,
        max_model_len=model.max_model_len,
    )
