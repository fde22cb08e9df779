"""The files of the formats as templates: every value is inserted as YAML that can't change what is around it.

Text that is quoted already, for a shell or nginx, is passed as `Markup`.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from packer.export.quoting import yaml_value


def read(name: str) -> str:
    """The text of a file of this folder."""
    return (files("packer.export.templates") / name).read_text("utf-8")


@cache
def _environment() -> Any:
    import jinja2
    from markupsafe import Markup

    return jinja2.Environment(
        loader=jinja2.FunctionLoader(read),
        autoescape=True,  # results of macros are Markup, which is not quoted again
        finalize=lambda value: value if isinstance(value, Markup) else Markup(yaml_value(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(name: str, **values: object) -> str:
    """A file from its template; the same values give the same bytes."""
    text: str = _environment().get_template(name).render(**values)
    return text
