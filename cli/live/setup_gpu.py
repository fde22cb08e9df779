"""`packer live setup-gpu`."""

from __future__ import annotations

from pathlib import Path

from packer.cli.declare import argument, bundle, command, flag, option, pairs
from packer.cli.live.setup_cpu import FOLDER, place_of, ready
from packer.cli.options import Writing, numbers

SETTINGS = {"max-model-len": 4096, "max-num-seqs": 256, "max-num-batched-tokens": 2048}
"""What vLLM is given, by default."""


@bundle
class GpuSetup:
    """The model, the GPU and the engine.

    model: Folder with config.json and tokenizer.
    gpu: As packer profiles estimate takes it: h200-141gb, …
    python: Interpreter of vLLM's environment.
    ranks: Ranks of the adapters.
    real_weights: Load the model's weights instead of making them up.
    settings: A setting that vLLM is given: max-model-len, max-num-seqs, max-num-batched-tokens; --max-num-seqs 64 is
        the same; repeatable. [default: 4096, 256, 2048]
    """

    folder: str = argument("FOLDER", type=FOLDER)
    model: str = option(required=True, metavar="DIR")
    gpu: str = option(required=True, metavar="NAME")
    python: str = option(required=True, metavar="PATH")
    ranks: tuple[int, ...] = option(type=numbers(int), default="8,16,32,64", metavar="LIST")
    real_weights: bool = flag()
    settings: dict[str, int] = pairs("--set", names=dict.fromkeys(SETTINGS, int))


@command
def setup_gpu(given: GpuSetup, out: Writing) -> None:
    """Write random adapters for a model and FOLDER/launch.toml, to calibrate its server on a GPU.

    \b
    Example:
      packer live setup-gpu h200 --model Llama-3.1-8B --gpu h200-141gb --python .venv-vllm/bin/python
      packer live calibrate --launch h200/launch.toml --budget 30m -o h200-llama-3.1-8b.toml
    """
    from packer.live.setup import setup_gpu as make

    launch = make(
        place_of(given.folder, out),
        Path(given.model),
        given.gpu,
        python=given.python,
        ranks=list(given.ranks),
        dummy_weights=not given.real_weights,
        engine={name.replace("-", "_"): value for name, value in SETTINGS.items()} | given.settings,
    )
    ready(launch, out)
