"""`packer profiles show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.declare import argument, bundle, command, flag
from packer.cli.options import Output
from packer.cli.output import number, table

if TYPE_CHECKING:
    from rich.table import Table

    from packer.profile import Profile

RANKS = (8, 16, 32, 64)
SLOTS = (8, 16, 32, 64, 128, 256, 384)


@bundle
class Given:
    """The profile."""

    profile_name: str = argument("NAME|FILE.toml")
    as_toml: bool = flag("--toml", help="Print the profile as its file.")


@command
def show(given: Given, out: Output) -> None:
    """Show one profile.

    \b
    Example:
      packer profiles show h100-64gb/qwen-2.5-7b-instruct
      packer profiles show h100-64gb/qwen-2.5-7b-instruct --toml > mine.toml
    """
    from packer.io.profiles import format_profile, load_profile, profile_to_dict

    profile = load_profile(given.profile_name)
    if given.as_toml:
        click.echo(format_profile(profile), nl=False)
        return
    data = {**profile_to_dict(profile), "label": profile.label, "fingerprint": profile.fingerprint}
    out.result(
        data, lambda: [table(profile.label, ["", ""], _facts(profile), left=(0, 1)), _capacity(profile)]
    )


def _facts(profile: Profile) -> list[list[str]]:
    model, engine, memory = profile.model, profile.engine, profile.memory
    return [
        ["model", f"{model.name}, {model.weights_bytes / 1e9:.1f} GB of weights"],
        ["adapter", f"{model.lora_bytes_per_rank / 1e6:.2f} MB per unit of rank"],
        ["GPU", f"{profile.gpu.name}, {profile.gpu.memory_bytes / 2**30:.1f} GiB"],
        ["price per hour", number(profile.gpu.price_per_hour, 2)],
        ["engine", f"{engine.name} {engine.version}, {engine.dtype}"],
        [
            "settings",
            f"max_model_len {engine.max_model_len}, max_num_seqs {engine.max_num_seqs}, "
            f"max_num_batched_tokens {engine.max_num_batched_tokens}, "
            f"gpu_memory_utilization {engine.gpu_memory_utilization:g}",
        ],
        [
            "slot",
            f"{memory.slot_bytes / 1e6:.2f} MB + {memory.slot_bytes_per_rank / 1e6:.2f} MB × max_lora_rank",
        ],
        ["memory points", f"{len(memory.measured)} measured"],
        ["step law", f"{profile.latency.form}, {len(profile.latency.coefficients)} terms"],
        *([f"error, {key}", f"{value:g}"] for key, value in profile.errors.items()),
        *([key, value] for key, value in profile.provenance.items()),
        ["fingerprint", profile.fingerprint],
    ]


def _capacity(profile: Profile) -> Table:
    """KV cache tokens over slots and slot rank; "–" where the server does not start."""
    from packer.operate.memory import memory_table

    tokens = memory_table(profile, SLOTS, RANKS).tokens
    rows = []
    for slots in SLOTS:
        cells = (tokens[slots, rank] for rank in RANKS)
        rows.append([slots, *("–" if found is None else f"{found:,}" for found in cells)])
    columns = ["max_loras", *(f"max_lora_rank {rank}" for rank in RANKS)]
    return table("KV cache tokens (–: the server does not start)", columns, rows, left=())
