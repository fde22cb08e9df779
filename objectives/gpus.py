"""Fewest GPUs: no server starves or fails to start."""

from __future__ import annotations

from dataclasses import dataclass

from packer.objectives.base import Objective


@dataclass(frozen=True)
class Gpus(Objective):
    """Minimise the number of GPUs."""

    name = "gpus"
