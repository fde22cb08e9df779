"""JSON and YAML texts as nested lists and dicts, without their traps."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from packer.errors import FileFormatError
from packer.io.tables import first_line

_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")


def parse_json(text: str, path: str | os.PathLike[str]) -> Any:
    """The data in a JSON text; a key given twice is an error."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"expected JSON: {error.msg} (character {error.colno} of the row).", path=path, row=error.lineno
        ) from None
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"expected JSON: {first_line(error)}.", path=path) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} appears twice in one object")
    return data


def parse_yaml(text: str, path: str | os.PathLike[str]) -> Any:
    """The data in a YAML text. Aliases are refused: a few of them can unfold into gigabytes."""
    import yaml

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc, valid-type]
        pass

    # PyYAML takes 1e-3 for text; YAML 1.2 and people take it for a number.
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        for event in yaml.parse(text, Loader=base):
            if isinstance(event, yaml.AliasEvent):
                message = f"YAML aliases (*{event.anchor}) are not read: write the value out."
                raise FileFormatError(message, path=path, row=_row(event.start_mark))
        return yaml.load(text, Loader=Loader)
    except FileFormatError:
        raise
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or first_line(error)
        row = _row(getattr(error, "problem_mark", None))
        raise FileFormatError(f"expected YAML: {str(problem)[:200]}.", path=path, row=row) from None
    except (ValueError, OverflowError, RecursionError, TypeError, AttributeError, KeyError) as error:
        raise FileFormatError(f"expected YAML: {first_line(error)}.", path=path) from None


def _row(mark: Any) -> int | None:
    return None if mark is None else int(mark.line) + 1
