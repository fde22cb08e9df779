"""What packer knows of running servers, in a file that is written after each step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packer.errors import FileFormatError, reader, shown
from packer.export.quoting import json_text
from packer.io.documents import parse_json
from packer.io.files import read_text, write_text
from packer.io.schema import check_version, parse
from packer.moves import by_adapter

MOST_HISTORY = 500
"""Steps that the file keeps."""


@dataclass(eq=False)
class LiveState:
    """Which adapters each server holds, with the share of their requests that goes there.

    `path`: the file. `plan`: what the servers are brought to, in words. `servers`: by name; a share of 0: held without
    requests. `doing`: the step that has begun; "" between steps. `history`: steps that are over, the latest last.
    """

    path: Path
    plan: str
    servers: dict[str, dict[str, float]]
    doing: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> LiveState:
        """The state in a file, or an empty one where there is none."""
        return _read(path) if Path(path).exists() else cls(Path(path), "", {})

    def routes(self, numbers: Mapping[str, int]) -> dict[str, dict[int, float]]:
        """By adapter: share of its requests by server; `numbers`: of the servers, by name."""
        return by_adapter(
            (numbers[server], {name: share for name, share in placed.items() if share > 0.0})
            for server, placed in self.servers.items()
            if server in numbers
        )

    def begin(self, what: str) -> None:
        """A step begins: the file says so before anything is done. Raises `OutputError`."""
        self.doing = what
        self._write()

    def done(self, error: str = "") -> None:
        """The step is over, perhaps with an error. Raises `OutputError`."""
        entry: dict[str, Any] = {"time_s": round(time.time(), 3), "step": self.doing}
        self.history = [*self.history, entry | ({"error": error} if error else {})][-MOST_HISTORY:]
        self.doing = ""
        self._write()

    def _write(self) -> None:
        names = ("plan", "servers", "doing", "history")
        data = {"schema": 1, **{name: getattr(self, name) for name in names}}
        write_text(self.path, json_text(data, indent=1) + "\n")


@reader
def _read(path: str) -> LiveState:
    data = check_version(parse_json(read_text(path)), 1)
    found = parse(LiveState, {**data, "path": path})
    for server, placed in found.servers.items():
        for name, share in placed.items():
            if not 0.0 <= share <= 1.0:
                raise FileFormatError(
                    f"expected a share from 0 to 1, got {shown(share)}.", key=f"servers.{server}.{name}"
                )
    return found
