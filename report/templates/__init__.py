"""The pages' templates, with their style and script."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from packer.report.palette import DARK, LIGHT, SERIES


def read(name: str) -> str:
    """The text of a file of this folder."""
    return (files("packer.report.templates") / name).read_text("utf-8")


@cache
def _environment() -> Any:
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "style": markupsafe.Markup(read("report.css")),
        "colors": SERIES,
        "light": LIGHT,
        "dark": DARK,
    }
    return environment


def render(name: str, **values: object) -> str:
    """A page from its template; the same values give the same bytes."""
    page: str = _environment().get_template(name).render(**values)
    return page
