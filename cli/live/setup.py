"""`packer live setup-cpu` and `packer live setup-gpu`."""

from __future__ import annotations

from pathlib import Path

import click

from packer.cli.declare import argument, bundle, command, option
from packer.cli.options import NumberList, Writing

FOLDER = click.Path(file_okay=False)


@bundle
class CpuSetup:
    """A vLLM for the CPU."""

    folder: str = argument("[FOLDER]", type=FOLDER, default="vllm-cpu")
    python: str | None = option(metavar="PATH", help="An interpreter that has vLLM already.")
    find_links: str | None = option(
        metavar="DIR|URL", help="Where a CPU build of torch lies.  [default: that of uv or pip]"
    )


@bundle
class GpuSetup:
    """A vLLM on a GPU."""

    folder: str = argument("FOLDER", type=FOLDER)
    model: str = option(required=True, metavar="DIR", help="Folder with config.json and tokenizer.")
    gpu: str = option(
        required=True, metavar="NAME", help="As packer profiles estimate takes it: h200-141gb, …"
    )
    python: str = option(required=True, metavar="PATH", help="Interpreter of vLLM's environment.")
    ranks: tuple[int, ...] = option(
        type=NumberList(int), default="8,16,32,64", metavar="LIST", help="Ranks of the adapters."
    )
    real_weights: bool = option(
        is_flag=True, default=False, help="Load the model's weights instead of making them up."
    )
    max_model_len: int = option(type=click.IntRange(1), default=4096)
    max_num_seqs: int = option(type=click.IntRange(1), default=256)
    max_num_batched_tokens: int = option(type=click.IntRange(1), default=2048)


@command
def setup_cpu(given: CpuSetup, out: Writing) -> None:
    """Make an environment with vLLM for the CPU, a tiny model and its adapters, and FOLDER/launch.toml.

    \b
    Example:
      packer live setup-cpu vllm-cpu && packer live calibrate --launch vllm-cpu/launch.toml
    """
    from packer.twin.live.setup_cpu import setup_cpu as make

    place = _place(given.folder, out)
    _ready(make(place, python=given.python, find_links=given.find_links, progress=out.note), out)


@command
def setup_gpu(given: GpuSetup, out: Writing) -> None:
    """Write random adapters for a model and FOLDER/launch.toml, to calibrate its server on a GPU.

    \b
    Example:
      packer live setup-gpu h200 --model Llama-3.1-8B --gpu h200-141gb --python .venv-vllm/bin/python
      packer live calibrate --launch h200/launch.toml --budget 30m -o h200-llama-3.1-8b.toml
    """
    from packer.twin.live.setup_gpu import setup_gpu as make

    launch = make(
        _place(given.folder, out),
        Path(given.model),
        given.gpu,
        python=given.python,
        ranks=list(given.ranks),
        dummy_weights=not given.real_weights,
        engine={
            key: getattr(given, key) for key in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
        },
    )
    _ready(launch, out)


def _place(folder: str, out: Writing) -> Path:
    """The folder, refused before long work if its launch file is there and would be replaced."""
    place = Path(folder)
    if (place / "launch.toml").exists():
        out.check(str(place / "launch.toml"))
    return place


def _ready(launch: Path, out: Writing) -> None:
    """Say where the launch file is and what to do with it."""
    out.result({"launch": str(launch)}, lambda: [f"Ready: packer live calibrate --launch {launch}"])
