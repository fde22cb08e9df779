"""Random adapters and a launch file for a model on a GPU, from its config.json and the GPU's data sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packer.fit.estimate import estimate_profile
from packer.fit.model_config import read_model_config
from packer.io.files import write_text
from packer.live.environment import usable_vllm
from packer.live.launch import Launch, launch_text
from packer.live.tiny_model import write_files


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

    `folder`: made if absent.
    `model`: folder with the model's config.json and tokenizer; the weights are not read with `dummy_weights`.
    `gpu`: name of a data sheet, as `packer profiles estimate` takes it.
    `python`: interpreter of vLLM's environment.
    `ranks`: ranks of the adapters.
    `dummy_weights`: whether the server runs with random weights.
    `engine`: `max_model_len`, `max_num_seqs`, `max_num_batched_tokens`, `gpu_memory_utilization`, if not default.
    Raises `LiveError`: the interpreter has no vLLM, or the adapters cannot be written.
    """
    found = usable_vllm(python)
    dimensions = read_model_config(str(model / "config.json"))
    estimated = estimate_profile(dimensions, gpu, **(engine or {}))
    folder.mkdir(parents=True, exist_ok=True)
    write_files(python, folder, dimensions, ranks, whole=False)
    arguments = ("--disable-uvicorn-access-log",)
    launch = Launch(
        name=estimated.name,
        model=str(model.resolve()),
        adapter_path="adapters/rank-{rank}",
        engine=replace(estimated.engine, version=found.version),
        model_spec=estimated.model,
        gpu=estimated.gpu,
        python=python,
        arguments=("--load-format", "dummy", *arguments) if dummy_weights else arguments,
        startup_timeout_s=900.0,
    )
    target = folder / "launch.toml"
    write_text(target, launch_text(launch))
    return target
