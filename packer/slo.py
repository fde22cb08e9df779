"""The goal under its other name."""

from __future__ import annotations

from packer.goal import Goal as Slo
from packer.goal import Limits as Limits

__all__ = ["Limits", "Slo"]
