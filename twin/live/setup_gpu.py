"""Random adapters and a launch file for a model on a GPU, from its config.json and the GPU's data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packer.io.files import write_text
from packer.profile import Profile
from packer.twin.estimate import estimate_profile
from packer.twin.live.environment import usable_vllm
from packer.twin.live.tiny_model import write_with
from packer.twin.model_config import read_model_config


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
        Folder with the model's config.json and tokenizer; the weights are not read with `dummy_weights`.
    gpu
        Name of a data sheet, as `packer profiles estimate` takes it.
    python
        Interpreter of vLLM's environment.
    ranks
        Ranks of the adapters.
    dummy_weights
        Whether the server runs with random weights.
    engine
        `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `gpu_memory_utilization`, if not default.

    Raises
    ------
    LiveError
        The interpreter has no vLLM, or the adapters cannot be written.
    """
    found = usable_vllm(python)
    dimensions = read_model_config(str(model / "config.json"))
    estimated = estimate_profile(dimensions, gpu, **(engine or {}))
    folder.mkdir(parents=True, exist_ok=True)
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
    shape = {name: getattr(dimensions, name) for name in names}
    spec = {"directory": str(folder.resolve()), "ranks": list(ranks), **shape}
    write_with(python, spec, "The adapters")
    target = folder / "launch.toml"
    write_text(target, launch_text(estimated, model.resolve(), python, found.version, dummy_weights))
    return target


def launch_text(profile: Profile, model: Path, python: str, version: str, dummy_weights: bool) -> str:
    """The launch file: settings of an estimated profile."""
    import tomlkit

    flags = (
        *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"),
        *("gpu_memory_utilization", "dtype", "tensor_parallel_size"),
    )
    sizes = ("weights_bytes", "kv_bytes_per_token", "lora_bytes_per_rank")
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
            **{name: float(getattr(profile.model, name)) for name in sizes},
        },
        "gpu": {"name": profile.gpu.name, "memory_bytes": float(profile.gpu.memory_bytes)},
        "engine": {"version": version, **{name: getattr(profile.engine, name) for name in flags}},
    }
    return tomlkit.dumps(document)
