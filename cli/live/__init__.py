"""`packer live`: real vLLM servers."""

from __future__ import annotations

from packer.cli.declare import group

COMMANDS = {
    "doctor": "Which vLLM is installed, and what is missing.",
    "setup-cpu": "A small vLLM for the CPU, with a tiny model.",
    "setup-gpu": "Random adapters for a model, and a launch file.",
    "calibrate": "Measure servers, started here or running at a URL, and fit their profile.",
    "validate": "Run a plan on real servers: predicted against measured.",
}


@group(COMMANDS)
def live() -> None:
    """Real vLLM: set it up, calibrate a profile with it, validate a plan on it.

    \b
    Example:
      packer live setup-cpu vllm-cpu
      packer live calibrate --launch vllm-cpu/launch.toml --budget 10m -o tiny.toml
    """
