"""What the GPUs of a plan draw, from their board power and the share of it that inference takes.

`SHARE`: power over the peak of H100 nodes that serve models, its centre and its 5th and 95th percentiles
(arXiv:2509.20241, section on node power). Host, network and cooling come on top.
"""

from __future__ import annotations

from dataclasses import dataclass

from packer.plan import Plan
from packer.twin.datasheets import GPUS
from packer.words import number

SHARE = (0.4, 0.7, 0.9)


@dataclass(frozen=True)
class Energy:
    """`board_watts`: of all GPUs by their data sheets; `tok_s`: tokens in and out per second that they serve."""

    board_watts: float
    tok_s: float

    @property
    def watts(self) -> tuple[float, float, float]:
        """Low, usual and high draw."""
        low, usual, high = (share * self.board_watts for share in SHARE)
        return low, usual, high

    @property
    def kwh_per_day(self) -> float:
        """At the usual draw."""
        return self.watts[1] * 24.0 / 1e3

    @property
    def joules_per_token(self) -> float:
        """At the usual draw, of a token in or out; NaN where none is served."""
        return self.watts[1] / self.tok_s if self.tok_s > 0.0 else float("nan")

    def __str__(self) -> str:
        low, usual, high = (f"{each / 1e3:.2g}" for each in self.watts)
        return (
            f"about {usual} kW ({low} to {high}: 40 to 90% of board power), {number(self.kwh_per_day, 0)} kWh a day, "
            f"{self.joules_per_token:.2g} J per token, GPUs alone"
        )


def energy_of(plan: Plan) -> Energy | None:
    """Of a plan's servers; None without servers, or where a GPU has no data sheet."""
    watts = {sheet.title: sheet.watts for sheet in GPUS.values()}
    profiles = [item.profile for item in plan.bins]
    if not profiles or any(profile.gpu.name not in watts for profile in profiles):
        return None
    board_watts = sum(watts[each.gpu.name] * each.engine.tensor_parallel_size for each in profiles)
    return Energy(board_watts, float(plan.evaluations.total_token_throughput.sum()))
