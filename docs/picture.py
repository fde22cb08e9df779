"""Draw what a command prints in a terminal as an SVG, for the README.

uv run python docs/picture.py docs/images/plan.svg packer solve examples/workloads/azure-conv-2023.csv
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from packer.io.files import write_text

COLUMNS = 116
PACKER = "import sys; from packer.cli import main; sys.argv[0] = 'packer'; main()"
WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""The picture must not fetch anything: readers' own fixed-width font does."""


def output_of(words: list[str]) -> str:
    """What a packer command prints on a terminal of `COLUMNS`, with colours; its files go nowhere."""
    workloads = [str(Path(word).resolve()) if Path(word).is_file() else word for word in words[1:]]
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [sys.executable, "-c", PACKER, *workloads],
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout


def picture(words: list[str]) -> str:
    """The command and its output as an SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {shlex.join(words)}", style="bold"))
    console.print(Text.from_ansi(output_of(words).rstrip()))
    drawn = console.export_svg(title="packer", theme=MONOKAI, unique_id="packer")
    return WEB_FONT.sub("", drawn)


def main() -> None:
    """Write the picture of a command."""
    parser = argparse.ArgumentParser(description="Draw what a packer command prints.")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="packer … with its arguments")
    options = parser.parse_args()
    if options.command[:1] != ["packer"]:
        parser.error("the command must be packer …")
    write_text(options.picture, picture(options.command))


if __name__ == "__main__":
    main()
