"""Fewest GPUs: no server starves or fails to start."""

from __future__ import annotations

from dataclasses import dataclass

from packer import checks
from packer.objectives.base import Objective


@dataclass(frozen=True)
class Gpus(Objective):
    """Minimise the number of GPUs.

    `stable`: if 1, no server may have a queue that grows for as long as requests arrive. The starvation threshold
    (0.9 of the load served within an hour) alone admits such servers.
    `spare`: if 1, the plan still holds after any one GPU is lost and its adapters move to the other GPUs.
    """

    stable: bool = False
    spare: int = 0

    name = "gpus"

    def __post_init__(self) -> None:
        checks.choice("stable", self.stable, (0, 1))
        checks.integer("spare", self.spare, low=0, high=1)
