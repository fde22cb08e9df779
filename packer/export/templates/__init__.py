"""Templates of the formats' files: every value is inserted as YAML that can't change the surrounding structure. Text
that is already quoted, for a shell or nginx, is passed as `Markup`, like the results of macros."""

from __future__ import annotations

from markupsafe import Markup

from packer.export.quoting import yaml_value
from packer.io.shipped import Templates

_templates = Templates(
    "packer.export.templates",
    {},
    finalize=lambda value: value if isinstance(value, Markup) else Markup(yaml_value(value)),
    keep_trailing_newline=True,
)
read, render = _templates.read, _templates.render
