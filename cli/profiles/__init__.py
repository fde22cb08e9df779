"""`packer profiles`: list, show, estimate, fit."""

from __future__ import annotations

from packer.cli.declare import group

COMMANDS = {
    "list": "The shipped profiles.",
    "show": "One profile: model, GPU, engine, memory, errors, provenance.",
    "estimate": "A profile from a model's config and a GPU's data sheet.",
    "fit": "A profile from tables of micro-benchmarks and runs.",
}


@group(COMMANDS)
def profiles() -> None:
    """Descriptions of servers: one (base model, GPU, engine, settings) each.

    `packer live calibrate` makes one from measurements of a real server.

    \b
    Example:
      packer profiles list
      packer profiles show h100-64gb/llama-3.1-8b-instruct
      packer profiles estimate --model config.json --gpu l40s -o l40s.toml
    """
