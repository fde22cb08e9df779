"""Writes docs/reference/ from the code: commands, Python API, strategies. With --check it only compares.

python docs/generate_reference.py [--check]
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

import packer
from packer import registry
from packer.cli import cli
from packer.twin.cluster.system import load_system, system_names

FOLDER = Path(__file__).resolve().parent / "reference"
HELP_OPTIONS = cli.context_settings["help_option_names"]
HEAD = "<!-- Written by docs/generate_reference.py; change the code, not this page. -->\n"


def commands() -> str:
    """Every command with its help, without the options that all commands have."""
    parts = [HEAD, "# Commands\n", *_shared(), ""]
    for words, found in _walk(cli, ("packer",)):
        command = copy.copy(found)
        command._help_option = None  # noqa: SLF001 - click keeps the one of the first context that the command ever had
        context = click.Context(
            command,
            info_name=" ".join(words),
            max_content_width=100,
            terminal_width=100,
            help_option_names=HELP_OPTIONS,
        )
        text = re.sub(r"(?m)^  (--json|-q, --quiet|--force|-h, --help)  .*\n?", "", command.get_help(context))
        text = re.sub(r"(?m)^(Output|Options):\n+(?=\Z|^\S)", "", text).rstrip()
        parts += [f"## {' '.join(words)}\n", "```text", text, "```\n"]
    return "\n".join(parts)


def _shared() -> list[str]:
    return [
        "Exit codes: 0 ok, 1 internal error, 2 wrong usage or input, 3 could not be done (no plan serves all adapters,",
        "a plan no longer holds, a server of vLLM or Prometheus failed or can't be reached),",
        "130 interrupted. `PACKER_DEBUG=1` shows where an internal error came from; `NO_COLOR=1` switches colours off;",
        "defaults come from [packer.toml](../how-to/configure.md).\n",
        "Every command has `--help`, `--json` (print JSON instead of tables) and `--quiet` (print only errors);",
        "commands that write files have `--force` (overwrite output files that exist).",
    ]


def _walk(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(command, help_option_names=HELP_OPTIONS)
    yield words, command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            if child is not None:
                yield from _walk(child, (*words, name))


def api() -> str:
    """Everything that `import packer` offers."""
    parts = [HEAD, "# Python API\n", "Everything here is an attribute of `packer`.\n"]
    for name in packer.__all__:
        if name.startswith("__"):
            continue
        value = getattr(packer, name)
        if inspect.isclass(value) and value.__name__ != name:
            parts += [f"## {name}\n", f"Another name of `{value.__name__}`.", ""]
            continue
        parts += [f"## {name}\n", *_signature(name, value), _text(value), ""]
    return "\n".join(parts)


def _signature(name: str, value: object) -> list[str]:
    if not callable(value) or (inspect.isclass(value) and issubclass(value, (Exception, str))):
        return []
    try:
        shown = str(inspect.signature(value))
    except ValueError:
        return []
    shown = re.sub(r"<factory>|<(function|object)[^>]*>( at 0x[0-9a-f]+>)?", "…", shown)
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", shown)  # annotations are kept as text
    if len(name) + len(shown) > 96:
        shown = re.sub(r", (?=\w+:|\*)", ",\n    ", shown).replace("(", "(\n    ", 1)
    return ["```python", f"{name}{shown}", "```\n"]


def _text(value: object) -> str:
    """A docstring; what it says of parameters, in numpydoc's sections or after their names, as lists."""
    lines = (inspect.getdoc(value) or "").split("\n")
    out, k, inside, named = [], 0, False, False
    while k < len(lines):
        if k + 1 < len(lines) and re.fullmatch(r"-{3,}", lines[k + 1]):
            out += ["", f"**{lines[k]}**", ""]
            k, inside = k + 2, True
            continue
        line = lines[k]
        starts = re.match(r"`[\w.]+`(, `[\w.]+`)*: ", line) is not None
        named = starts or (named and line != "" and not line.startswith("Raises "))
        if inside and line and not line.startswith(" "):
            line = f"- `{line}`:" if re.fullmatch(r"[\w, .*]+", line) else line
        elif named:
            line = f"- {line}" if starts else f"  {line}"
        elif line.startswith("Raises ") and out[-1]:
            out.append("")
        out.append(f"  {line.strip()}" if inside and line.startswith(" ") else line)
        k += 1
    return "\n".join(out)


def strategies() -> str:
    """Objectives, predictors, routers and solvers by name."""
    parts = [
        HEAD,
        "# Objectives, predictors, routers, solvers\n",
        "Registered under these names; see also [write your own](../write-your-own.md).\n",
    ]
    for kind in registry.GROUPS:
        parts += [f"## {kind.capitalize()}s\n".replace("ys\n", "ies\n")]
        if kind == "system":  # folders of descriptions
            systems = map(load_system, system_names())
            parts += [*(f"- `{each.name}`: {each.summary}" for each in systems), ""]
            continue
        for name in registry.names(kind):
            value = registry.load(kind, name)
            target = value if inspect.isclass(value) else inspect.getmodule(value)
            summary = (inspect.getdoc(value) or inspect.getdoc(target) or "").split("\n\n")[0]
            parts.append(f"- `{name}`: {' '.join(summary.split())}")
        parts.append("")
    return "\n".join(parts)


def pages() -> dict[str, str]:
    """File name → text of every generated page."""
    found = {"commands.md": commands(), "api.md": api(), "strategies.md": strategies()}
    return {name: text.rstrip() + "\n" for name, text in found.items()}


def main() -> int:
    """Write the pages, or say which are out of date."""
    importlib.import_module("packer.cli")
    stale = [name for name, text in pages().items() if not _same(FOLDER / name, text)]
    if "--check" in sys.argv:
        for name in stale:
            sys.stderr.write(f"docs/reference/{name} is out of date: python docs/generate_reference.py\n")
        return 1 if stale else 0
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.exists() and path.read_text("utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
