"""The tiny model for servers on the CPU: what it is, how big, and how it is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packer.errors import LiveError
from packer.fit.dimensions import ModelDimensions
from packer.fit.model_config import read_model_config
from packer.live import inside
from packer.live.launch import Emulation, Launch
from packer.profile import EngineSpec, GpuSpec, ModelSpec

RANKS = (8, 16, 32, 64)


TINY = read_model_config(Path(inside.__file__).with_name("tiny-llama") / "config.json")
"""A Llama small enough for one CPU core: steps take 2 to 20 ms, as a large one's on a GPU."""


def write_files(
    python: str, folder: Path, model: ModelDimensions, ranks: Sequence[int], *, whole: bool
) -> None:
    """Write `adapters/rank-N/`, and `model/`, the tiny one, if `whole`, below `folder` with vLLM's interpreter.

    Raises `LiveError`: the interpreter lacks `tokenizers` or `safetensors`, or cannot write there.
    """
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
    shape = {name: getattr(model, name) for name in (*names, *(("vocabulary",) if whole else ()))}
    spec = {"directory": str(folder.resolve()), "ranks": list(ranks), **shape}
    script = Path(inside.__file__).with_name("make_tiny_model.py")
    done = subprocess.run(
        [python, str(script), json.dumps(spec)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        what = "The tiny model" if whole else "The adapters"
        raise LiveError(f"{what} could not be written: {done.stderr.strip()[-500:]}")


KV_BUDGET_BYTES = 20_000_000.0


def tiny_launch(python: str, version: str) -> Launch:
    """How to start the tiny model; server and client on different cores where there are two.

    The CPU back end takes the KV cache's size as given: the GPU's rule, by which slots come out of the same memory,
    is emulated.
    """
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    server, client = (cores[:1], cores[1:2]) if len(cores) > 1 else ([], [])
    spec = ModelSpec(TINY.name, TINY.weights_bytes, TINY.kv_bytes_per_token, TINY.lora_bytes_per_rank)
    return Launch(
        name="cpu/tiny-llama",
        model="model",
        adapter_path="adapters/rank-{rank}",
        engine=EngineSpec("vllm", version, TINY.max_model_len, 512, 64, block_size=32),
        model_spec=spec,
        gpu=GpuSpec("one CPU core, emulated slot memory", KV_BUDGET_BYTES),
        python=python,
        arguments=("--load-format", "dummy", "--enforce-eager", "--disable-uvicorn-access-log"),
        environment={"OMP_NUM_THREADS": "1"},
        emulation=Emulation(KV_BUDGET_BYTES, spec.lora_bytes_per_rank),
        server_cores=tuple(server),
        client_cores=tuple(client),
        api_cores=tuple(client),
        token_ids=(4, TINY.vocabulary),
        startup_timeout_s=300.0,
    )
