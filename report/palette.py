"""Colours of every picture: safe for colour-blind readers, and readable on light and on dark ground.

Each series colour has a contrast of at least 3:1 (WCAG 2.2, 1.4.11) against both grounds, so that a picture
can change its theme without changing its meaning; markers and dashes distinguish series without colour.
"""

from __future__ import annotations

from dataclasses import dataclass

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7b6bd0", "#a87000", "#808080")
"""Okabe and Ito's palette, with its too light hues darkened."""


@dataclass(frozen=True, slots=True)
class Theme:
    """Ground, ink and grid of a theme."""

    ground: str
    ink: str
    grid: str
    faint: str


LIGHT = Theme(ground="#ffffff", ink="#1b1f24", grid="#e3e6ea", faint="#57606a")
DARK = Theme(ground="#14171c", ink="#e6e8eb", grid="#2f353d", faint="#9aa4af")
