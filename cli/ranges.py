"""Lists of numbers as people type them: 8,16,32 and START:STOP:STEP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

LONGEST_RANGE = 10_000


def numbers(*, whole: bool) -> Callable[[click.Context, click.Parameter, Any], tuple[float, ...] | None]:
    """Option callback: numbers separated by commas, and ranges START:STOP:STEP with both ends; sorted."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
        if value is None:
            return None
        try:
            return tuple(sorted({number for part in value.split(",") for number in _span(part, whole=whole)}))
        except (ValueError, OverflowError):
            kind = "whole numbers" if whole else "numbers"
            message = f"Expected {kind} such as 8,16,32 or START:STOP:STEP, got {value[:80]!r}."
            raise click.BadParameter(message, ctx, param) from None

    return convert


def _span(text: str, *, whole: bool) -> list[float]:
    bounds = [int(piece) if whole else float(piece) for piece in text.split(":")]
    if len(bounds) == 1:
        return [bounds[0]]
    start, stop, step = bounds
    count = int((stop - start) / step + 1e-9) + 1 if step > 0 and stop >= start else 0
    if not 0 < count <= LONGEST_RANGE:
        raise ValueError
    return [start + k * step if whole else round(start + k * step, 12) for k in range(count)]
