"""Commands whose parameters are fields of dataclasses: each is declared once and arrives as an attribute.

    @bundle
    class Given:
        workload_path: str = argument("WORKLOAD")
        window_s: float = option("--window", default=3600.0, metavar="SECONDS", help="Length of a window.")

    @command
    def describe(given: Given, out: Output) -> None: ...

A field without flags is typed as its name: `max_loras` is `--max-loras`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, dataclass_transform, get_type_hints

import click
from click.core import ParameterSource

T = TypeVar("T")


def option(*flags: str, **attributes: Any) -> Any:
    """A field that is an option of the command line; `attributes` are those of `click.Option`."""
    default = attributes.get("default", () if attributes.get("multiple") else None)
    given = {"show_default": True, **attributes}
    missing = MISSING if attributes.get("required") else default
    return field(default=missing, metadata={"kind": click.Option, "flags": flags, "attributes": given})


def flag(*flags: str, help: str) -> Any:  # noqa: A002 - click's word
    """A field that is a switch, off by default."""
    return option(*flags, is_flag=True, default=False, help=help)


def argument(metavar: str, **attributes: Any) -> Any:
    """A field that is a positional argument."""
    given = {"metavar": metavar, **attributes}
    default = attributes.get("default", MISSING)
    return field(default=default, metadata={"kind": click.Argument, "flags": (), "attributes": given})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, flag, argument))
def bundle(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are parameters of a command."""
    return dataclass(frozen=True, kw_only=True)(cls)


def parameters(cls: type) -> list[click.Parameter]:
    """The parameters that a bundle's fields declare, in their order."""
    found: list[click.Parameter] = []
    for each in fields(cls):
        kind, flags = each.metadata["kind"], each.metadata["flags"]
        if kind is click.Option and not any(text.startswith("--") for text in flags):
            flags = (*flags, f"--{each.name.replace('_', '-')}")
        found.append(kind([each.name, *flags], **each.metadata["attributes"]))
    return found


def typed(names: Collection[str]) -> Iterator[str]:
    """Those of the running command's parameters that are on the command line, as they are typed there."""
    context = click.get_current_context()
    for each in context.command.params:
        name = each.name or ""
        if name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield each.opts[-1]


def command(function: Callable[..., Any]) -> click.Command:
    """A click command from a function whose parameters are bundles; its docstring is the help page."""
    kinds = {key: kind for key, kind in get_type_hints(function).items() if key != "return"}

    @wraps(function)
    def call(**values: Any) -> Any:
        given = {
            key: kind(**{each.name: values[each.name] for each in fields(kind)})
            for key, kind in kinds.items()
        }
        return function(**given)

    params = [each for kind in kinds.values() for each in parameters(kind)]
    name = function.__name__.strip("_").replace("_", "-")
    return click.Command(name, callback=call, params=params, help=_page(function))


def _page(function: Callable[..., Any]) -> str:
    """The docstring without its indentation."""
    import inspect

    return inspect.getdoc(function) or ""


class LazyGroup(click.Group):
    """A group that imports a command when it is called, and suggests the nearest name of a wrong one.

    `lazy`: name → (module:attribute, line of the help page), in the order of the help page.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help page."""
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now, with its defaults from packer.toml."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        from packer.cli.config import defaults_for

        found = imported(self.lazy[cmd_name][0])
        words = (*ctx.command_path.split()[1:], cmd_name)
        ctx.default_map = {**(ctx.default_map or {}), cmd_name: defaults_for(found, words)}
        return found

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
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()])


def imported(place: str) -> click.Command:
    """The command at module:attribute."""
    module, attribute = place.split(":")
    found: click.Command = getattr(import_module(module), attribute)
    return found


def group(commands: Mapping[str, tuple[str, str]]) -> Callable[[Callable[[], None]], LazyGroup]:
    """A group of commands that are imported when they are called; the function's docstring is its page."""

    def make(function: Callable[[], None]) -> LazyGroup:
        return LazyGroup(function.__name__, lazy=commands, help=_page(function))

    return make
