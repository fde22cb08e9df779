"""`packer completion`: a script that makes the shell complete commands, options and names."""

from __future__ import annotations

import click

from packer.cli.declare import argument, bundle, command

VARIABLE = "_PACKER_COMPLETE"


@bundle
class Shell:
    """Which shell."""

    shell: str = argument("bash|zsh|fish", type=click.Choice(("bash", "zsh", "fish")))


@command
def completion(given: Shell) -> None:
    """Print a script that makes the shell complete packer's commands, options and names.

    \b
    Examples:
      packer completion bash > ~/.local/share/bash-completion/completions/packer
      packer completion zsh > ~/.zfunc/_packer
      packer completion fish > ~/.config/fish/completions/packer.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from packer.cli import cli

    kind = get_completion_class(given.shell)
    assert kind is not None
    # The base class's: bash's own runs bash to look at its version.
    click.echo(ShellComplete.source(kind(cli, {}, "packer", VARIABLE)))
