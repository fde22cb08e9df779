"""`packer profiles`: list, show, estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from packer.cli import LazyGroup
from packer.cli.options import json_option, quiet_option

if TYPE_CHECKING:
    from packer.profile import Profile

COMMANDS = {"estimate": "packer.cli.profiles_estimate:estimate"}

SHORT_HELP = {
    "list": "The shipped profiles.",
    "show": "One profile: model, GPU, engine, memory, errors, provenance.",
    "estimate": "A profile from a model's config and a GPU's data sheet.",
}


@click.group(cls=LazyGroup, lazy=COMMANDS, short=SHORT_HELP)
def profiles() -> None:
    """Calibrated descriptions of servers: one (base model, GPU, engine, settings) each.

    \b
    Example:
      packer profiles list
      packer profiles show h100-64gb/llama-3.1-8b-instruct
      packer profiles estimate --model config.json --gpu l40s -o l40s.toml
    """


@profiles.command(name="list")
@json_option
@quiet_option
def list_profiles(as_json: bool, quiet: bool) -> None:
    """List the shipped profiles. Errors are SMAPE on runs not used for the fit (percent, 0–200).

    \b
    Example:
      packer profiles list
    """
    from packer.cli.output import number, print_json, show, table
    from packer.io.profiles import load_profile, profile_names

    found = [load_profile(name) for name in profile_names()]
    if as_json:
        print_json([summarise(profile) for profile in found])
    if as_json or quiet:
        return
    rows = [
        [
            profile.label,
            profile.gpu.name,
            f"{profile.engine.name} {profile.engine.version}",
            number(profile.gpu.price_per_hour, 2),
            *(number(profile.errors.get(f"{key}_smape")) for key in ("throughput", "itl", "ttft_queued")),
        ]
        for profile in found
    ]
    columns = ["profile", "GPU", "engine", "price/h", "error %: tok/s", "ITL", "TTFT (queued)"]
    show(table(None, columns, rows, left=(0, 1, 2)))


@profiles.command(name="show")
@click.argument("profile_name", metavar="NAME|FILE.toml")
@click.option("--toml", "as_toml", is_flag=True, help="Print the profile as its file.")
@json_option
@quiet_option
def show_profile(profile_name: str, as_toml: bool, as_json: bool, quiet: bool) -> None:
    """Show one profile.

    \b
    Example:
      packer profiles show h100-64gb/qwen-2.5-7b-instruct
      packer profiles show h100-64gb/qwen-2.5-7b-instruct --toml > mine.toml
    """
    from packer.cli.output import print_json, show, table
    from packer.io.profiles import format_profile, load_profile, profile_to_dict

    profile = load_profile(profile_name)
    if as_toml:
        click.echo(format_profile(profile), nl=False)
    elif as_json:
        print_json({**profile_to_dict(profile), "label": profile.label, "fingerprint": profile.fingerprint})
    elif not quiet:
        show(table(profile.label, ["", ""], _facts(profile), left=(0, 1)), _capacity(profile))


def summarise(profile: Profile) -> dict[str, Any]:
    """What `list --json` says of a profile."""
    return {
        "name": profile.name,
        "label": profile.label,
        "calibrated": profile.calibrated,
        "model": profile.model.name,
        "gpu": profile.gpu.name,
        "price_per_hour": profile.gpu.price_per_hour,
        "engine": f"{profile.engine.name} {profile.engine.version}",
        "errors": dict(profile.errors),
        "fingerprint": profile.fingerprint,
    }


def _facts(profile: Profile) -> list[list[str]]:
    from packer.cli.output import number

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


def _capacity(profile: Profile) -> Any:
    """KV cache tokens over slots and slot rank; "–" where the server does not start."""
    from packer.cli.output import table
    from packer.twin.memory.policy import kv_cache_tokens, memory_error

    def tokens(slots: int, rank: int) -> str:
        settings = profile.settings(slots, rank)
        return "–" if memory_error(profile, settings) else f"{kv_cache_tokens(profile, settings):,}"

    ranks = (8, 16, 32, 64)
    rows = [[slots, *(tokens(slots, rank) for rank in ranks)] for slots in (8, 16, 32, 64, 128, 256, 384)]
    columns = ["max_loras", *(f"max_lora_rank {rank}" for rank in ranks)]
    return table("KV cache tokens (–: the server does not start)", columns, rows, left=())
