"""The files of the formats as templates: every value is inserted as YAML that can't change what is around it.

Text that is quoted already, for a shell or nginx, is passed as `Markup`, as are the results of macros.
"""

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
