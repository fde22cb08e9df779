"""TOML files and Jinja templates that ship with the package, by name."""

from __future__ import annotations

import os
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from packer.errors import UnknownNameError
from packer.io.files import read_text


@cache
def shipped(*packages: str) -> dict[str, Traversable]:
    """TOML files in the packages' folders and direct subfolders, sorted by "name" or "folder/name" without ".toml"."""
    found: dict[str, Traversable] = {}
    for entry in (entry for package in packages for entry in files(package).iterdir()):
        inner = {f"{entry.name}/{item.name}": item for item in entry.iterdir()} if entry.is_dir() else {}
        found |= inner or {entry.name: entry}
    return {name[:-5]: entry for name, entry in sorted(found.items()) if name.endswith(".toml")}


def read_named(kind: str, name_or_path: str | os.PathLike[str], *packages: str) -> tuple[str, str]:
    """Name and text of a file of one of the packages, or of the `.toml` file at a path. Raises `UnknownNameError`: no
    file has that name; the message lists the names of this `kind`. `FileFormatError`."""
    text = os.fspath(name_or_path)
    if text.endswith(".toml"):
        return os.path.basename(text).removesuffix(".toml"), read_text(text)
    known = shipped(*packages)
    if text not in known:
        raise UnknownNameError(kind, text, known)
    return text, known[text].read_text(encoding="utf-8")


def table(package: str, file: str) -> dict[str, Any]:
    """The data of a TOML or YAML file that is part of a package's code; nothing is checked."""
    text = files(package).joinpath(file).read_text(encoding="utf-8")
    if file.endswith(".toml"):
        import tomllib

        return tomllib.loads(text)
    import yaml

    found: dict[str, Any] = yaml.safe_load(text)
    return found


class Templates:
    """Templates in a package's folder, which see `names`; `options` of `jinja2.Environment`, imported late."""

    def __init__(self, package: str, names: dict[str, object], **options: Any) -> None:
        self.package, self.names, self.options = package, names, options

    def read(self, name: str) -> str:
        """The text of a file of the folder."""
        return files(self.package).joinpath(name).read_text("utf-8")

    @cached_property
    def _environment(self) -> Any:
        import jinja2

        rules = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True} | self.options
        loader = jinja2.FunctionLoader(self.read)
        environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **rules)
        environment.globals |= self.names
        return environment

    def render(self, name: str, **values: object) -> str:
        """Render a template; the same values give the same bytes."""
        text: str = self._environment.get_template(name).render(**values)
        return text
