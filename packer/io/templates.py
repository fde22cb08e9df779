"""Jinja templates that travel with the package."""

from __future__ import annotations

from functools import cached_property
from importlib.resources import files
from typing import Any


class Templates:
    """The templates in the folder of a package.

    `names`: available in all of them.
    `options`: of `jinja2.Environment`, which is imported for the first one that is rendered.
    """

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
        """A text from its template; the same values give the same bytes."""
        text: str = self._environment.get_template(name).render(**values)
        return text
