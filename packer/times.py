"""Spans of time, s."""

from __future__ import annotations

HOUR_S = 3600.0
DAY_S = 86_400.0
LATEST_S = 7_258_118_400.0  # 2200-01-01
SINCE_1970_S = 1e8  # Times below this count from the start of a trace without dates.
