"""The command `packer`: a click group whose commands are imported only when they are called."""

from __future__ import annotations

import difflib
import os
import sys
from importlib import import_module

import click

LAZY = {
    "solve": "packer.cli.solve:solve",
    "simulate": "packer.cli.simulate:simulate",
    "sweep": "packer.cli.sweep:sweep",
    "evaluate": "packer.cli.evaluate:evaluate",
    "compare": "packer.cli.compare:compare",
    "replan": "packer.cli.replan:replan",
    "watch": "packer.cli.watch:watch",
    "whatif": "packer.cli.whatif:whatif",
    "memory": "packer.cli.memory:memory",
    "export": "packer.cli.export:export",
    "report": "packer.cli.report:report",
    "validate": "packer.cli.validate:validate",
    "calibrate": "packer.cli.calibrate:calibrate",
    "live": "packer.cli.live:live",
    "predict": "packer.cli.predict:predict",
    "train": "packer.cli.train:train",
    "dataset": "packer.cli.dataset:dataset",
    "workload": "packer.cli.workload:workload",
    "profiles": "packer.cli.profiles:profiles",
    "completion": "packer.cli.completion:completion",
}
"""Command → where it lives. Order is the order of the help page."""

SHORT_HELP = {
    "solve": "Plan: how many GPUs, which adapter where, how to start each server.",
    "simulate": "What one server would do with a workload: the twin's metrics.",
    "sweep": "How far until it breaks: curves over adapters, rates and max_loras.",
    "evaluate": "Judge a plan again: another predictor, seed or duration.",
    "compare": "Solvers, objectives and predictors side by side.",
    "replan": "Follow a changed workload, moving few adapters.",
    "report": "A page for people: each GPU, curves to the breaking point, bound, provenance.",
    "watch": "Compare the traffic with the plan; advise when to plan again.",
    "whatif": "Whether the plan holds when rates grow, adapters come or go.",
    "memory": "How many adapters fit, and what slots cost in KV cache.",
    "export": "What starts a plan: vLLM commands, Kubernetes, Helm, AIBrix, routing tables.",
    "validate": "Run a plan on real vLLM servers: predicted against measured.",
    "calibrate": "Make a profile from measurements: tables, or live servers.",
    "live": "Real vLLM: what is missing, and a small one for the CPU.",
    "predict": "What a predictor says of one server, and why.",
    "train": "Learn to judge servers from a dataset; rules for people.",
    "dataset": "What predictors learn from: servers judged by the twin.",
    "workload": "Make and describe workloads: generate, from traces, logs and metrics.",
    "profiles": "Calibrated servers: list, show, estimate.",
    "completion": "A script for bash, zsh or fish.",
}
"""What the help page of the group shows, so that no command must be imported for it."""


def _set_defaults(ctx: click.Context, command: click.Command, name: str) -> None:
    """Let packer.toml give the command's options their defaults."""
    from packer.cli.config import defaults_for

    words = (*ctx.command_path.split()[1:], name)
    ctx.default_map = {**(ctx.default_map or {}), name: defaults_for(command, words)}


class LazyGroup(click.Group):
    """A group that imports a command when it is asked for, and suggests the nearest name of a wrong one."""

    def __init__(self, *args: object, lazy: dict[str, str], short: dict[str, str], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.lazy, self.short = lazy, short

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help page."""
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self.lazy[cmd_name].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        _set_defaults(ctx, command, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest name in the message of an unknown command."""
        name = args[0]
        if not name.startswith("-") and name not in self.list_commands(ctx):
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            listed = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"No such command {name[:80]!r}.{hint} Known: {listed}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands from the short texts, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.short.get(name, "")) for name in self.list_commands(ctx)])


@click.group(
    cls=LazyGroup,
    lazy=LAZY,
    short=SHORT_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(package_name="adapter-packer", prog_name="packer")
def cli() -> None:
    """How many GPUs a fleet of LoRA adapters needs, which adapter goes where, and how to start each server.

    \b
    Example:
      packer solve examples/workloads/azure-conv-2023.csv --objective gpus
    """


def main() -> None:
    """Entry point: errors become one line and an exit code, never a traceback."""
    from packer.cli.streams import flush, prepare

    prepare()
    sys.exit(flush(run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """Run the command line; the exit code: 0 ok, 1 internal, 2 input, 3 could not be done, 130 interrupted."""
    from functools import partial

    from packer.cli.streams import fail
    from packer.errors import PackerError

    failed = partial(fail, as_json="--json" in arguments)
    try:
        result = cli.main(arguments, prog_name="packer", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        return failed(error, 130, message="interrupted")
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        return failed(error, 2)
    except PackerError as error:
        return failed(error, error.exit_code)
    except BrokenPipeError:
        return 0
    except OSError as error:  # a full disk or stream, a missing permission
        return failed(error, 2)
    except MemoryError as error:
        return failed(error, 2, message="not enough memory")
    except Exception as error:
        if os.environ.get("PACKER_DEBUG"):
            raise
        kind = type(error).__name__
        return failed(error, 1, message=f"internal error: {kind}: {error} (PACKER_DEBUG=1 shows where)")
    return result if isinstance(result, int) else 0
