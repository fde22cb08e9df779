"""Spans of time, s."""

from __future__ import annotations

from collections.abc import Sequence

HOUR_S = 3600.0
DAY_S = 86_400.0
LATEST_S = 7_258_118_400.0  # 2200-01-01
SINCE_1970_S = 1e8  # Times below this count from the start of a trace without dates.


def joined(spans: Sequence[tuple[float, float]], gap_s: float, day_s: float = DAY_S) -> list[tuple[float, float]]:
    """Spans of a repeating day, s, ascending; two of them with a gap of at most `gap_s` become one. A span across
    midnight comes last and ends before it starts. Without a longer gap the result is the whole day."""
    found: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if found and start_s - found[-1][1] <= gap_s:
            start_s, end_s = found[-1][0], max(found.pop()[1], end_s)
        found.append((start_s, end_s))
    if not found or found[0][0] + day_s - found[-1][1] > gap_s:
        return found
    return [*found[1:-1], (found[-1][0], found[0][1])] if len(found) > 1 else [(0.0, day_s)]
