"""Fingerprints of dataclasses: equal content gives equal digests, in every version of packer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import numpy as np

SCHEMA = 1
"""Version of the canonical form; raised when a field's default, or the meaning of a field, changes."""


def fingerprint(**parts: object) -> str:
    """SHA-256 of the canonical form of named parts: 16 hex digits.

    Fields of dataclasses that have their default value are left out, and so are empty parts: a new field with
    a default, or a new part that is empty by default, changes no fingerprint. Equal numbers of different types
    give the same fingerprint; the order of keys does not matter.
    """
    filled = {name: form for name, part in parts.items() if (form := canonical(part)) not in (None, {}, [])}
    text = json.dumps({"schema": SCHEMA, "parts": filled}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(value: Any) -> Any:
    """A value as JSON-able data: dataclasses as dicts without defaults, numbers as floats, arrays as digests."""
    if is_dataclass(value) and not isinstance(value, type):
        given = {item.name: getattr(value, item.name) for item in fields(value) if _is_set(value, item)}
        return canonical(given)
    if isinstance(value, Mapping):
        return {str(key): canonical(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [canonical(each) for each in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    return float(value)


def _is_set(value: object, item: Field[Any]) -> bool:
    """True if a field differs from its default."""
    given = getattr(value, item.name)
    if item.default is not MISSING:
        return bool(given != item.default)
    return item.default_factory is MISSING or bool(given != item.default_factory())
