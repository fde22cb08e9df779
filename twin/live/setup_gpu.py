"""Random adapters and a launch file for a model on a GPU, from its config.json and the GPU's data sheet."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packer.errors import LiveError
from packer.io.files import write_text
from packer.profile import Profile
from packer.twin.estimate import estimate_profile
from packer.twin.live import inside
from packer.twin.live.environment import VllmEnvironment, probe
from packer.twin.model_config import ModelDimensions, read_model_config


def setup_gpu(
    folder: Path,
    model: Path,
    gpu: str,
    *,
    python: str,
    ranks: Sequence[int],
    dummy_weights: bool = True,
    engine: dict[str, Any] | None = None,
) -> Path:
    """Write `folder/adapters/rank-N` with random weights and `folder/launch.toml`; returns the latter.

    Parameters
    ----------
    folder
        Made if absent.
    model
        Folder with the model's config.json and tokenizer; the weights aren't read with `dummy_weights`.
    gpu
        Name of a data sheet, as `packer profiles estimate` takes it.
    python
        Interpreter of vLLM's environment.
    ranks
        Ranks of the adapters.
    dummy_weights
        Whether the server makes its weights up.
    engine
        `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `gpu_memory_utilization`, if not default.

    Raises
    ------
    LiveError
        The interpreter has no vLLM, or the adapters can't be written.
    """
    found = probe(python)
    if not isinstance(found, VllmEnvironment):
        raise LiveError(f"There is no usable vLLM: {found}.")
    dimensions = read_model_config(str(model / "config.json"))
    estimated = estimate_profile(dimensions, gpu, **(engine or {}))
    folder.mkdir(parents=True, exist_ok=True)
    write_adapters(python, folder.resolve(), dimensions, ranks)
    target = folder / "launch.toml"
    write_text(target, launch_text(estimated, model.resolve(), python, found.version, dummy_weights))
    return target


def write_adapters(python: str, folder: Path, model: ModelDimensions, ranks: Sequence[int]) -> None:
    """Adapters of a Llama-like model on all its projections, with vLLM's interpreter."""
    spec = {
        "directory": str(folder),
        "ranks": list(ranks),
        "hidden": model.hidden,
        "intermediate": model.intermediate,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }
    script = Path(inside.__file__).with_name("make_tiny_model.py")
    done = subprocess.run(
        [python, str(script), json.dumps(spec)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise LiveError(f"The adapters could not be written: {done.stderr.strip()[-500:]}")


def launch_text(profile: Profile, model: Path, python: str, version: str, dummy_weights: bool) -> str:
    """The launch file: settings of an estimated profile."""
    import tomlkit

    engine = profile.engine
    arguments = ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    document: dict[str, Any] = {
        "name": profile.name,
        "python": python,
        "adapter_path": "adapters/rank-{rank}",
        "arguments": ["--load-format", "dummy", *arguments] if dummy_weights else arguments,
        "startup_timeout_s": 900.0,
        "model": {
            "name": profile.model.name,
            "path": str(model),
            "weights_bytes": float(profile.model.weights_bytes),
            "kv_bytes_per_token": float(profile.model.kv_bytes_per_token),
            "lora_bytes_per_rank": float(profile.model.lora_bytes_per_rank),
        },
        "gpu": {"name": profile.gpu.name, "memory_bytes": float(profile.gpu.memory_bytes)},
        "engine": {
            "version": version,
            "max_model_len": engine.max_model_len,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_num_seqs": engine.max_num_seqs,
            "block_size": engine.block_size,
            "gpu_memory_utilization": engine.gpu_memory_utilization,
            "dtype": engine.dtype,
            "tensor_parallel_size": engine.tensor_parallel_size,
        },
    }
    return tomlkit.dumps(document)
