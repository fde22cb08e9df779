"""Spans of time, s."""

from __future__ import annotations

HOUR_S = 3600.0
DAY_S = 86_400.0
