"""Objectives by name, with their parameters."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from packer import registry
from packer.errors import ValidationError, shown
from packer.objectives.base import Objective


def load_objective(spec: str) -> Objective:
    """The objective that a text names: "gpus", or with parameters "slo:mean_ttft_ms=500,p99_itl_ms=60".

    Raises
    ------
    UnknownNameError
        No objective has that name.
    ValidationError
        It has no such parameter, or the value breaks a rule.
    """
    name, colon, text = spec.partition(":")
    kind = registry.load("objective", name)
    known = {item.name for item in fields(kind) if item.init} if is_dataclass(kind) else set()
    given: dict[str, Any] = {}
    for part in text.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals:
            raise ValidationError(f"Expected parameters as {name}:key=value,…, got {shown(part)}.")
        if key not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ValidationError(f"The objective {name!r} has no parameter {shown(key)}; it has: {listed}.")
        given[key] = _value(value)
    objective: Objective = kind(**given)
    return objective


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
