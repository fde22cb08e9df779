"""How results of benchmarks are kept: JSON with a line for each row, so that a changed row is one line of a diff."""

from __future__ import annotations

import json

MOST_CHARACTERS = 500  # What is longer, and has parts, takes a line for each part.


def record_text(value: object, indent: str = "") -> str:
    """The value as JSON, without a newline at its end."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= MOST_CHARACTERS or not isinstance(value, dict | list | tuple):
        return line
    inner, (opened, closed) = indent + " ", "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        parts = [f"{record_text(str(key))}: {record_text(each, inner)}" for key, each in value.items()]
    else:
        parts = [record_text(each, inner) for each in value]
    return f"{opened}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closed}"
