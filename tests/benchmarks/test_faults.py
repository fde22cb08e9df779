"""A disk that is full while a command writes costs the result, and nothing else; no command is left out."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from packer.cli import cli
from packer.cli.config import every_option

PLACES = ("FILE", "FOLDER", "PATH", "PLAN", "DIR")
"""Parts of the metavars of options that name a file or folder."""
INPUTS = {
    "--add", "--adapters-dir", "--api-key-env", "--available", "--base", "--bench", "--cluster",
    "--comparison", "--find-links", "--folder", "--gpu", "live follow --fleet", "live follow --html",
    "--from", "--input", "--launch", "--model", "--predictor", "--price", "--profile", "--profiling", "--python",
    "--ranks", "--rates", "--runs", "--servers", "show --diff", "--sources", "--system", "--trace", "solve --loads",
}  # fmt: skip
"""Options that name what is read, a folder of intermediate results, or a page that is written as long as a loop runs
(tests/operate/test_follow.py); every other one names a result."""


def test_a_full_disk(root: Path) -> None:
    """Exit code 2 without a traceback; old results stay, no half-written one appears, no temporary file stays."""
    script = root / "benchmarks" / "fuzz" / "faults.py"
    only = "-o o.json --per-adapter|export|workload generate|predictor build|memory|report plan"
    done = subprocess.run(
        [sys.executable, script, "--rounds", "1", "--faults", "none,full disk", "--only", only],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = re.search(r"^(\d+) cases, 0 findings", done.stdout, re.MULTILINE)
    assert cases is not None
    assert int(cases[1]) >= 16


def _commands(group: click.Group, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from _commands(found, (*words, name))
        else:
            yield " ".join((*words, name)), found


def test_every_option_that_writes_is_tried(root: Path) -> None:
    """Each command with --force, and each of its options that names a result, is in the list of commands."""
    spec = importlib.util.spec_from_file_location("faults", root / "benchmarks" / "fuzz" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    faults = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faults)
    missing, writing = [], 0
    for name, found in _commands(cli):
        tried = [line.split() for line in faults.COMMANDS if f"{line} ".startswith(f"{name} ")]
        options = every_option(found)
        places = {
            each.opts[-1]: [*each.opts, *(f"--{one}" for one in getattr(each, "names", ()))]
            for each in options
            if any(place in (each.metavar or "") for place in PLACES)
        }
        results = [key for key in places if key not in INPUTS and f"{name} {key}" not in INPUTS]
        writes = any("--force" in each.opts for each in options)
        writing += writes
        missing += [name] if writes and not tried else []
        missing += [f"{name} {key}" for key in results if not any(set(places[key]) & set(line) for line in tried)]
    assert missing == []
    assert writing >= 20
