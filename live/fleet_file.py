"""A TOML file of the servers that packer may change and of their router (docs/how-to/live.md), and their state file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packer import checks
from packer.errors import FileFormatError, ValidationError, reader, shown
from packer.export.formats import FORMATS
from packer.export.quoting import file_name, json_text
from packer.io.documents import parse_json, parse_toml
from packer.io.files import read_text, write_text
from packer.io.schema import check_version, parse
from packer.io.web import Address, address_of, key_of
from packer.live.launch import filled
from packer.moves import by_adapter

ROUTING = tuple(name for name, kind in FORMATS.items() if kind.routes)


@dataclass(frozen=True)
class Host:
    """One server. `name`: by default gpu-0, gpu-1, …. `room`: adapters that it may hold at once; None: any number.
    `profile`: None: any of the plan's. `start`, `stop`: commands, with {name} and {url} quoted for the shell."""

    url: str
    name: str = ""
    room: int | None = None
    profile: str | None = None
    start: str | None = None
    stop: str | None = None

    def __post_init__(self) -> None:
        if self.room is not None:
            checks.integer("the room of a server", self.room, low=1)
        for what, text in (("start", self.start), ("stop", self.stop)):
            filled(what, text or "", name=self.name, url=self.url)


@dataclass(frozen=True)
class RouterFile:
    """The file with a router's routes to adapters, or a folder for formats of several files, and the command that makes
    the router reload it. `namespace`, `adapters_claim`, `token_secret`: options of `packer export` for Kubernetes."""

    format: str
    file: str
    reload: str | None = None
    namespace: str | None = None
    adapters_claim: str | None = None
    token_secret: str | None = None

    def __post_init__(self) -> None:
        if self.format not in ROUTING:
            raise ValidationError(f"Expected a format among {', '.join(ROUTING)}, got {shown(self.format)}.")


@dataclass(frozen=True)
class StepLimits:
    """Limits on the time of steps and on the number of changes.

    `load_s`, `drain_s`, `start_s`: maximum time to load an adapter, to drain its requests, to start a server.
    `answer_s`: maximum time of any other answer.
    `settle_s`: time after a change of routes for which requests may still take the old routes.
    `tries`: attempts of a step before it is rolled back.
    `loads_per_hour`: maximum number of loads per hour that `packer live follow` makes.
    """

    load_s: float = 120.0
    drain_s: float = 120.0
    start_s: float = 900.0
    answer_s: float = 10.0
    settle_s: float = 2.0
    tries: int = 3
    loads_per_hour: int = 600

    def __post_init__(self) -> None:
        for name in ("load_s", "drain_s", "start_s", "answer_s"):
            checks.real(name, getattr(self, name), low=0.0, high=1e5, open_low=True)
        checks.real("settle_s", self.settle_s, low=0.0, high=1e4)
        checks.integer("tries", self.tries, low=1, high=100)
        checks.integer("loads_per_hour", self.loads_per_hour, low=1)


@dataclass(frozen=True)
class LiveFleet:
    """The servers, the router and the limits.

    `adapters`: path of an adapter on the servers; {name} is a folder as in exports, {rank} may be there, too.
    `model`: name of the base model there; None: the profile's. `api_key_env`: environment variable with the key.
    `state`: file of the servers' state; "": this file's name with .state.json.
    """

    servers: tuple[Host, ...]
    router: RouterFile | None = None
    limits: StepLimits = field(default_factory=StepLimits)
    adapters: str = "/adapters/{name}"
    model: str | None = None
    api_key_env: str | None = None
    state: str = ""

    def __post_init__(self) -> None:
        if not self.servers:
            raise ValidationError("Expected at least one server, got none.")
        named = tuple(replace(each, name=each.name or f"gpu-{k}") for k, each in enumerate(self.servers))
        for each in named:
            address_of(each.url)
        own = {"name": [each.name for each in named], "url": [_place(each.url) for each in named]}
        for what, found in own.items():
            twice = next((text for k, text in enumerate(found) if text in found[:k]), None)
            if twice is not None:
                raise ValidationError(f"Expected servers with a {what} of their own, got {shown(twice)} twice.")
        self.path_of("name", 8)
        object.__setattr__(self, "servers", named)

    def path_of(self, name: str, rank: int, url: str = "") -> str:
        """Return the path of an adapter on the server at `url`; below an absolute path its folder is as in exports."""
        own = file_name(name) if self.adapters.startswith("/") else name
        return filled("adapters", self.adapters, name=own, url=url, rank=rank)

    def addresses(self) -> list[Address]:
        """Return the servers' addresses with the key in `api_key_env`. Raises `ValidationError`: the key is not set."""
        key = key_of(self.api_key_env)
        return [address_of(each.url, key) for each in self.servers]


@reader
def read_live_fleet(path: str | os.PathLike[str]) -> LiveFleet:
    """Read servers.toml; raises `FileFormatError`."""
    found = parse(LiveFleet, check_version(parse_toml(read_text(path)), 1))
    base = Path(path).resolve()
    router = found.router
    if router is not None:
        router = replace(router, file=str(base.parent / router.file))
    state = base.parent / (found.state or f"{base.stem}.state.json")
    if state.is_dir():
        raise FileFormatError(f"expected a file, got a folder: {shown(str(state))}.", key="state")
    return replace(found, router=router, state=str(state))


def _place(url: str) -> str:
    """Where an address leads, however it is written."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    host = "127.0.0.1" if parts.hostname in ("localhost", "::1") else parts.hostname
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"


MOST_HISTORY = 500  # Maximum number of past steps in the state file.


@dataclass(eq=False)
class LiveState:
    """The adapters that each server holds, with the share of each adapter's requests that is routed to the server.

    `path`: the state file. `plan`: the plan to reach, in words. `servers`: shares by server name; 0: loaded, not
    routed. `doing`: the step that has begun; "" between steps. `history`: finished steps, the latest last.
    """

    path: Path
    plan: str
    servers: dict[str, dict[str, float]]
    doing: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: str) -> LiveState:
        """Read the state in a file; without a file the state is empty."""
        return _read_state(path) if Path(path).exists() else cls(Path(path), "", {})

    def routes(self, numbers: Mapping[str, int]) -> dict[str, dict[int, float]]:
        """Return for each adapter the share of its requests by server; `numbers`: server name → number."""
        return by_adapter(
            (numbers[server], {name: share for name, share in placed.items() if share > 0.0})
            for server, placed in self.servers.items()
            if server in numbers
        )

    def begin(self, what: str) -> None:
        """Record the start of a step in the file, before the step is done. Raises `OutputError`."""
        self.doing = what
        self._write()

    def done(self, error: str = "") -> None:
        """Record the end of the step, with its error if any. Raises `OutputError`."""
        entry: dict[str, Any] = {"time_s": round(time.time(), 3), "step": self.doing}
        self.history = [*self.history, entry | ({"error": error} if error else {})][-MOST_HISTORY:]
        self.doing = ""
        self._write()

    def _write(self) -> None:
        names = ("plan", "servers", "doing", "history")
        data = {"schema": 1, **{name: getattr(self, name) for name in names}}
        write_text(self.path, json_text(data, indent=1) + "\n")


@reader
def _read_state(path: str) -> LiveState:
    found = parse(LiveState, {**check_version(parse_json(read_text(path)), 1), "path": path})
    for server, placed in found.servers.items():
        for name, share in placed.items():
            if not 0.0 <= share <= 1.0:
                raise FileFormatError(
                    f"expected a share from 0 to 1, got {shown(share)}.", key=f"servers.{server}.{name}"
                )
    return found
