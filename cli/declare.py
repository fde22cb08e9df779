"""Commands whose parameters are fields of dataclasses. Each parameter is declared once and read as an attribute.

    @bundle
    class Given:
        \"""What is described.

        window_s: Length of a window.
        \"""

        workload_path: str = argument("WORKLOAD")
        window_s: float = option("--window", default=3600.0, metavar="SECONDS")

    @command
    def describe(given: Given, out: Output) -> None: ...

A field without flags takes its name as its flag: `max_loras` is `--max-loras`. Its help is its line in the docstring,
or the attribute `help` if the text is computed or several bundles share the option.
"""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, dataclass_transform, get_type_hints

import click
from click.core import ParameterSource

from packer.cli.streams import only_results
from packer.errors import InputError, ValidationError

T = TypeVar("T")
click.IntRange.name, click.FloatRange.name = "integer", "number"  # not "integer range", of which no user has heard
Readers: TypeAlias = "Mapping[str, click.ParamType[Any] | Callable[[str], Any]]"
FEW_OPTIONS = 12  # Largest number of options that a help page lists in one section.


def option(*flags: str, **attributes: Any) -> Any:
    """A field that is an option of the command line. `attributes`: keyword arguments of `click.Option`."""
    default = attributes.get("default", () if attributes.get("multiple") else None)
    given = {"show_default": True, **attributes}
    missing = MISSING if attributes.get("required") else default
    return field(default=missing, metadata={"kind": click.Option, "flags": flags, "attributes": given})


def flag(*flags: str, everywhere: bool = False) -> Any:
    """A field that is a switch, off by default. `everywhere`: every command has it, like `--help`."""
    found = option(*flags, is_flag=True, default=False)
    return field(default=found.default, metadata={**found.metadata, "everywhere": everywhere})


def pairs(*flags: str, names: Readers, refused: Mapping[str, str] = MappingProxyType({}), **attributes: Any) -> Any:
    """A field that is a repeatable option NAME=VALUE; each name is also an option of its own, `--NAME VALUE`.

    `names`: name → reader of its value: a click type, or a function that raises `ValueError`. The field's value is a
    dict by parameter name. `refused`: name that users may try → reason why there is no such option.
    """
    found = option(*flags, multiple=True, **{"metavar": "NAME=VALUE", **attributes})
    given = {**found.metadata["attributes"], "names": names, "refused": refused}
    return field(default_factory=dict, metadata={**found.metadata, "kind": Pairs, "attributes": given})


def name_of(text: str) -> str:
    """The name in NAME=VALUE as options spell it."""
    return text.partition("=")[0].replace("_", "-")


class Pairs(click.Option):
    """See `pairs`."""

    def __init__(self, *args: Any, names: Readers, refused: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, shell_complete=self._completed, **kwargs)
        self.names, self.refused = names, refused

    def _completed(self, _ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        return [f"{name}=" for name in self.names if name.startswith(incomplete)]

    def options(self) -> list[click.Option]:
        """Return each name as an option, typed so that a shell can complete its values."""
        kinds = ((n, read if isinstance(read, click.ParamType) else None) for n, read in self.names.items())
        return [click.Option([f"--{name}"], type=kind, expose_value=False) for name, kind in kinds]

    def spelled(self, args: Sequence[str]) -> list[str]:
        """Replace each `--NAME VALUE` in the arguments by this option with NAME=VALUE."""
        found: list[str] = []
        rest = iter(args)
        for each in rest:
            flag, equals, value = each.partition("=")
            if each == "--":
                return [*found, each, *rest]
            if flag[:2] == "--" and flag[2:] in self.refused:
                raise click.UsageError(f"{flag}: {self.refused[flag[2:]]}.")
            if flag[:2] != "--" or flag[2:] not in self.names:
                found.append(each)
                continue
            given = value if equals else next(rest, None)
            if given is None:
                raise click.BadOptionUsage(flag, f"Option {flag!r} requires an argument.")
            found += [self.opts[-1], f"{flag[2:]}={given}"]
        return found

    def process_value(self, ctx: click.Context, value: Any) -> dict[str, Any]:
        """Return values by name, each of which may be given once; names that are not typed have those of packer.toml,
        like other options."""
        found: dict[str, Any] = {}
        texts = list(super().process_value(ctx, value) or ())
        if ctx.get_parameter_source(self.name or "") is ParameterSource.COMMANDLINE:
            own = ctx.meta[f"{self.name} typed"] = {name_of(text) for text in texts}
            texts += [text for text in ctx.lookup_default(self.name or "") or () if name_of(text) not in own]
        for text in texts:
            name, (_, equals, given) = name_of(text), text.partition("=")
            if name in self.refused:
                raise click.BadParameter(f"{name}: {self.refused[name]}.", ctx, self)
            if not equals or name not in self.names:
                rule = f"expected NAME=VALUE with one of {', '.join(self.names)}, got {text[:80]!r}."
                raise click.BadParameter(rule, ctx, self)
            if name.replace("-", "_") in found:
                raise click.BadParameter(f"expected each name once, got {name} twice.", ctx, self)
            try:
                read = self.names[name]
                value = read.convert(given, self, ctx) if isinstance(read, click.ParamType) else read(given)
                found[name.replace("-", "_")] = value
            except click.BadParameter as error:
                error.param_hint = f"'--{name}'"
                raise
            except InputError as error:
                raise click.BadParameter(f"{name}: {error}", ctx, self) from None
            except (KeyError, ValueError):
                raise click.BadParameter(f"no value of {name}: {given[:80]!r}.", ctx, self) from None
        return found


def argument(metavar: str, **attributes: Any) -> Any:
    """A field that is a positional argument."""
    given = {"metavar": metavar, **attributes}
    default = attributes.get("default", MISSING)
    return field(default=default, metadata={"kind": click.Argument, "flags": (), "attributes": given})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, flag, pairs, argument))
def bundle(cls: type[T]) -> type[T]:
    """A frozen dataclass whose fields are parameters of a command."""
    return dataclass(frozen=True, kw_only=True)(cls)


def parameters(cls: type) -> list[click.Parameter]:
    """The parameters that a bundle's fields declare, in their order."""
    texts, found = _texts(cls), []
    for each in fields(cls):
        kind, flags, given = (each.metadata[key] for key in ("kind", "flags", "attributes"))
        if kind is not click.Argument:
            given = {"help": texts.pop(each.name, None), **given}
            if not any(text.startswith("--") for text in flags):
                flags = (*flags, f"--{each.name.replace('_', '-')}")
        found.append(kind([each.name, *flags], **given))
    if texts:
        raise TypeError(f"{cls.__name__} explains {', '.join(texts)}, which are no options of it")
    return found


def _texts(cls: type) -> dict[str, str]:
    """Help of each option: the lines `name: text` below the docstring's first line, including base classes."""
    found = {}
    for each in reversed(cls.__mro__[:-1]):
        lines = inspect.cleandoc(each.__doc__ or "").partition("\n\n")[2]
        for name, text in re.findall(r"^(\w+): (.+(?:\n +.+)*)", lines, re.MULTILINE):
            found[name] = " ".join(text.split()).replace(" [default:", "  [default:")
    return found


def typed(names: Collection[str], *, in_file: bool = False) -> Iterator[str]:
    """Yield the options on the command line, or those of packer.toml, whose parameters are in `names`, as they are
    typed. Of `pairs`, `names` may have the parameter or some of its own names."""
    context = click.get_current_context()
    wanted = ParameterSource.DEFAULT_MAP if in_file else ParameterSource.COMMANDLINE
    for each in context.command.params:
        name = each.name or ""
        own = each.opts[0] if each.opts[0][:2] == "--" else each.opts[-1]
        flags = {name: own} if context.get_parameter_source(name) is wanted else {}
        if isinstance(each, Pairs):
            given = {key: key.replace("_", "-") for key in context.params.get(name, {})}
            on_line = context.meta.get(f"{name} typed", ())
            flags = {key: f"--{text}" for key, text in given.items() if (text in on_line) is not in_file}
        if name in names:
            yield from list(flags.values())[:1]
        else:
            yield from (flag for key, flag in flags.items() if key in names)


def _as_typed(text: str) -> str:
    """A rule of the library; if it is about a parameter that is an option on the command line, or in packer.toml, with
    the option's name."""
    rule = re.match(r"Expected ((?:\w+\.)*(\w+)) to be ", text)
    if rule is None:
        return text
    flag, of_file = (next(typed([rule[2]], in_file=in_file), "") for in_file in (False, True))
    if flag[:2] != "--" and of_file:
        from packer.cli.config import config_path

        flag = f"{of_file} (in {config_path()})"
    return text.replace(rule[1], flag, 1) if flag[:2] == "--" else text


def values(given: object, *without: str) -> dict[str, Any]:
    """Parameters of a bundle by name, except `without`, as keyword arguments of a function with the same names."""
    return {name: value for name, value in vars(given).items() if name not in without}


def command(function: Callable[..., Any]) -> click.Command:
    """A click command from a function whose parameters are bundles; its docstring is the help page."""
    kinds = [(key, kind) for key, kind in get_type_hints(function).items() if key != "return"]

    @wraps(function)
    def call(**values: Any) -> Any:
        given = {key: kind(**{each.name: values[each.name] for each in fields(kind)}) for key, kind in kinds}
        with only_results():
            try:
                return function(**given)
            except ValidationError as error:
                error.args = (_as_typed(str(error)),)
                raise

    declared = [each for _, kind in kinds for each in parameters(kind)]
    everywhere = {each.name for _, kind in kinds for each in fields(kind) if each.metadata.get("everywhere")}
    params = [each for each in declared if each.name not in everywhere]
    name = function.__name__.strip("_").replace("_", "-")
    made = Command(name, callback=call, params=params, help=inspect.getdoc(function))
    made.everywhere = [each for each in declared if each.name in everywhere]
    return made


class Command(click.Command):
    """A command whose help page groups its options by subject, as in `options.toml`. `everywhere`: switches that every
    command has, like `--help`."""

    everywhere: Sequence[click.Parameter] = ()

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return all parameters. During shell completion, the names of `pairs` are options too."""
        own = super().get_params(ctx)
        named = [option for each in self._pairs if ctx.resilient_parsing for option in each.options()]
        return [*own[: len(self.params)], *self.everywhere, *own[len(self.params) :], *named]

    @property
    def _pairs(self) -> list[Pairs]:
        return [each for each in self.params if isinstance(each, Pairs)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace the names of `pairs` by their options, then parse as click does. An option of one value that is given
        again is refused, and an argument too many with what the command takes, and what takes a file of its kind."""
        for each in [] if ctx.resilient_parsing else self._pairs:
            args = each.spelled(args)
        ctx.allow_extra_args = True
        order = [] if ctx.resilient_parsing else self.make_parser(ctx).parse_args(list(args))[2]
        for given in order:
            if isinstance(given, click.Option) and not (given.multiple or given.is_flag) and order.count(given) > 1:
                ctx.fail(f"{given.opts[-1]} takes one value and is given {order.count(given)} times.")
        rest = super().parse_args(ctx, args)
        if rest and not ctx.resilient_parsing:
            from packer.io.recognise import described, kind_of

            takes = " ".join(str(each.metavar) for each in self.params if isinstance(each, click.Argument))
            said = f"Got unexpected extra argument ({' '.join(rest)}): {ctx.command_path} takes"
            ctx.fail(f"{said} {takes or 'options alone'}. {described(kind_of(rest[0]))}".rstrip())
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections. A command with at most `FEW_OPTIONS` options has one section."""
        rows = {
            max(each.opts, key=len)[2:]: row
            for each in self.get_params(ctx)
            if isinstance(each, click.Option) and (row := each.get_help_record(ctx)) is not None
        }
        sections = option_sections() if len(rows) > FEW_OPTIONS else {}
        for title, names in sections.items():
            if shown := [rows.pop(name) for name in names if name in rows]:
                with formatter.section(title):
                    formatter.write_dl(shown)
        if rows:
            with formatter.section("Options"):
                formatter.write_dl(list(rows.values()))


@cache
def option_sections() -> dict[str, list[str]]:
    """Sections of help pages, in their order: title → options without dashes, in their order."""
    return {title: text.split() for title, text in _options()["sections"].items()}


@cache
def shared_help() -> dict[str, str]:
    """Help of options that several commands share, by their names."""
    texts = {name: " ".join(text.split()) for name, text in _options()["help"].items()}
    return {name: text.replace(" [default:", "  [default:") for name, text in texts.items()}


@cache
def _options() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("options.toml").read_text("utf-8"))


class LazyGroup(click.Group):
    """A group of `commands.toml`, which imports a command when it is called and suggests a name similar to a wrong one.

    The function of the command `from-log` is `from_log`, or `from_log_` if Python uses the name. Its module is the one
    in `modules`, otherwise the group's module; if the group is a package, its submodule `from_log`.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        found = _groups()[name]
        page, self.lazy = found["page"], found["commands"]
        self.aliases, self.modules = found.get("aliases", {}), found.get("modules", {})
        self.package = "packer.cli" if name == "packer" else f"packer.cli.{name}"
        super().__init__(name, help=page, **kwargs)

    def load(self, name: str) -> click.Command:
        """Import a command."""
        if name in _groups():
            return LazyGroup(name)
        word = name.replace("-", "_")
        module = import_module(f"packer.cli.{self.modules[name]}" if name in self.modules else self.package)
        if hasattr(module, "__path__"):
            module = import_module(f"{self.package}.{word}")
        found: click.Command = getattr(module, word, None) or getattr(module, f"{word}_")
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help page."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command and set its defaults from packer.toml."""
        cmd_name = self.aliases.get(cmd_name, cmd_name)
        if cmd_name not in self.lazy:
            return None
        from packer.cli.config import defaults_for

        found = self.load(cmd_name)
        words = (*ctx.command_path.split()[1:], cmd_name)
        ctx.default_map = {**(ctx.default_map or {}), cmd_name: defaults_for(found, words)}
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does. The error for an unknown command suggests the most similar name."""
        name = args[0] = self.aliases.get(args[0], args[0])
        if not name.startswith("-") and name not in self.lazy:
            near = difflib.get_close_matches(name, self.lazy, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {name[:80]!r}.{hint} Known: {', '.join(self.lazy)}.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands with the short texts of `commands.toml`, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lazy.items()))


@cache
def _groups() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text("utf-8"))
