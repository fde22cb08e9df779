"""The pages' templates, with their style and script."""

from __future__ import annotations

from markupsafe import Markup

from packer.io.shipped import Templates
from packer.report.figures import DARK, LIGHT, SERIES

_templates = Templates("packer.report.templates", {"colors": SERIES, "light": LIGHT, "dark": DARK})
_templates.names["style"] = Markup(_templates.read("report.css"))
read, render = _templates.read, _templates.render
