"""Fingerprints of dataclasses: equal content gives equal digests, in every version of packer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any

import numpy as np

SCHEMA = 1  # Version of the canonical form; raised when a field's default, or the meaning of a field, changes.


def fingerprint(**parts: object) -> str:
    """First 16 hex digits of the SHA-256 of the canonical form of named parts.

    Dataclass fields with their default value and empty parts are left out. A new field with a default, or a new
    part that is empty by default, therefore changes no fingerprint. Equal numbers of different types give the same
    fingerprint; the order of keys does not matter.
    """
    filled = {name: form for name, part in parts.items() if (form := canonical(part)) not in (None, {}, [])}
    text = json.dumps({"schema": SCHEMA, "parts": filled}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(value: Any) -> Any:
    """A value as JSON-able data: dataclasses as dicts without defaults, numbers as floats, arrays as digests."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (float, int)):
        return float(value)
    if is_dataclass(value) and not isinstance(value, type):
        given = ((name, getattr(value, name), default) for name, default in _defaults(type(value)))
        return {
            name: canonical(each)
            for name, each, default in given
            if default is MISSING or isinstance(each, np.ndarray) or each != default
        }
    if isinstance(value, Mapping):
        return {str(key): canonical(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return [canonical(each) for each in value] if isinstance(value, Sequence) else float(value)


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    """Fields of a dataclass that count (`compare`), with their defaults; `MISSING` for fields without one."""
    found = (f for f in fields(kind) if f.compare)
    return tuple((f.name, f.default if f.default_factory is MISSING else f.default_factory()) for f in found)
