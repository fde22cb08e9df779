"""`packer profiles show`."""

from __future__ import annotations

import click

from packer.cli.declare import argument, bundle, command, flag
from packer.cli.options import Output
from packer.cli.output import Table
from packer.cli.streams import results

RANKS = (8, 16, 32, 64)
SLOTS = (8, 16, 32, 64, 128, 256, 384)


@bundle
class ShowOptions:
    """The profile.

    as_toml: Print the profile as its file.
    """

    profile_name: str = argument("NAME|FILE.toml")
    as_toml: bool = flag("--toml")


@command
def show(given: ShowOptions, out: Output) -> None:
    """Show one profile.

    \b
    Example:
      packer profiles show h100-64gb/qwen-2.5-7b-instruct
      packer profiles show h100-64gb/qwen-2.5-7b-instruct --toml > mine.toml
    """
    from packer.cli.memory import capacity
    from packer.io.profiles import format_profile, load_profile, profile_to_dict
    from packer.operate.memory import memory_table

    profile = load_profile(given.profile_name)
    if given.as_toml:
        click.echo(format_profile(profile), nl=False, file=results())
        return
    data = {**profile_to_dict(profile), "label": profile.label, "fingerprint": profile.fingerprint}
    errors = [(f"error, {key}", f"{value:g}") for key, value in profile.errors.items()]
    facts = [*profile.facts(), *errors]
    table = Table(profile.label, ["", ""], facts, left=(0, 1))
    out.result(data, lambda: [table, capacity(memory_table(profile, SLOTS, RANKS))])
