"""Write the file of a router in front of running servers, and restore the old file if the router rejects it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from packer.errors import LiveError, OutputError, PackerError, ValidationError, shown
from packer.export import quoting
from packer.export.formats import FORMATS
from packer.export.servers import Module, Options, servers
from packer.io.files import make_folder, write_bytes
from packer.live.fleet_file import LiveFleet
from packer.live.host import ShellCommand
from packer.plan import Plan

Routes = Mapping[str, Mapping[int, float]]  # For each adapter the share of its requests by server.


@dataclass(frozen=True, eq=False)
class RouterWriter:
    """Writes the routes of a fleet's servers in the format of its router. `ranks`: of all adapters, also of those that
    came after the plan; 0: the base model."""

    fleet: LiveFleet
    plan: Plan
    ranks: Mapping[str, int]

    def __post_init__(self) -> None:
        for host in self.fleet.servers if self.fleet.router is not None else ():
            parts = urlsplit(host.url)
            if parts.scheme != "http" or parts.path.strip("/") or quoting.dns_name(host.name) != host.name:
                rule = "Expected servers behind a router file to have addresses as http://host:port and names of small"
                raise ValidationError(f"{rule} letters, digits and '-', got {shown(host.name)} at {shown(host.url)}.")

    def texts(self, routes: Routes) -> dict[str, str]:
        """Return the files of these routes by name; servers and adapters without a share are left out."""
        router = self.fleet.router
        assert router is not None
        names = ("namespace", "adapters_claim", "token_secret")
        options = Options(**{name: getattr(router, name) for name in names})
        base = servers(self.plan, options)
        found = []
        for s, host in enumerate(self.fleet.servers):
            parts = urlsplit(host.url)
            held = sorted((name, places[s]) for name, places in routes.items() if places.get(s, 0.0) > 0.0)
            own: list[Module] = []
            plain: list[Module] = []
            for name, share in held:
                rank = self.ranks.get(name)
                path = "" if rank == 0 else self.fleet.path_of(name, rank or 0)
                (plain if rank == 0 else own).append(Module(name, path, share))
            if held:
                port = parts.port or 80
                like = replace(base[min(s, len(base) - 1)], index=s, name=host.name, port=port)
                where = parts.netloc.rpartition("@")[2].rstrip(":")  # an IPv6 address keeps its brackets
                address = where if parts.port else f"{where}:{port}"
                found.append(replace(like, address=address, modules=tuple(own), base=tuple(plain)))
        render = FORMATS[router.format].render
        return render(tuple(found), options)

    def _files(self, routes: Routes) -> tuple[dict[Path, bytes], dict[Path, bytes]]:
        """Return the files of these routes, and what they contain now; files that don't exist are left out there."""
        router = self.fleet.router
        assert router is not None
        texts, target = self.texts(routes), Path(router.file)
        single = len(texts) == 1
        if target.exists() and target.is_dir() == single:
            expected, got = ("a file", "a folder") if single else ("a folder", "a file")
            rule = f"Expected `file` of [router] to be {expected} for the format {router.format}"
            raise OutputError(f"{rule}, got {got}: {target}")
        paths = [target] if single else [target / name for name in texts]
        try:
            old = {path: path.read_bytes() for path in paths if path.exists()}
        except OSError as error:
            raise OutputError(f"`file` of [router] can't be read: {error}.") from None
        return dict(zip(paths, (text.encode() for text in texts.values()), strict=True)), old

    def differs(self, routes: Routes) -> bool:
        """Whether the files are not those of these routes. Raises `OutputError`: the files can't be read."""
        files, old = self._files(routes)
        return files != old

    def write(self, routes: Routes, *, again: bool = False) -> None:
        """Write the files and make the router reload them; if that fails, restore the old files and remove new ones.

        Without a route the files stay: a router has at least one server.
        `again`: reload even if no file changes, because packer may have been killed before the router read them.
        Raises `LiveError`: a write or the reload fails; `OutputError`: the old files can't be read or written.
        """
        if self.fleet.router is None or not routes:
            return
        files, old = self._files(routes)
        if old == files and not again:
            return
        try:
            if Path(self.fleet.router.file) not in files:
                make_folder(self.fleet.router.file)
            for path, data in files.items():
                write_bytes(path, data)
            self._reload()
        except PackerError as error:
            for path in files:  # a new one would pass at the next attempt for one that the router has read
                if path in old:
                    write_bytes(path, old[path])
                else:
                    path.unlink(missing_ok=True)
            if old:
                with suppress(LiveError):  # without a reload the router keeps its old routes
                    self._reload()
            raise LiveError(f"The router did not take its new routes: {error}") from None

    def _reload(self) -> None:
        """Run the command that makes the router reload its files, if there is one."""
        if self.fleet.router is not None and self.fleet.router.reload is not None:
            ShellCommand(self.fleet.router.reload, self.fleet.addresses()[0]).wait(self.fleet.limits.start_s)
