"""How far the load of a server may grow, what limits it, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Of one server.

    `slo`, `queue`, `starvation`: largest factor of all its rates, of those tried, at which its adapters keep their
    latency limits; at which no queue grows; at which it does not starve. None where that fails at the rates as given.
    `limit`: what limits the server first: "slots", "KV cache", "batch", "prefill", "loading", "step time", "bursts"
    or "front end".
    `usage`: how much of it is in use at the load where the latency limits break, in words.
    `advice`: what would help, in words; "" where nothing is known.
    """

    slo: float | None
    queue: float | None
    starvation: float | None
    limit: str = ""
    usage: str = ""
    advice: str = ""

    @property
    def headroom(self) -> float | None:
        """The smallest of the three factors; None where one fails at the rates as given."""
        marks = (self.slo, self.queue, self.starvation)
        known = [factor for factor in marks if factor is not None]
        return min(known) if len(known) == len(marks) else None


def grouped(rooms: Sequence[Room]) -> list[tuple[tuple[int, ...], Room]]:
    """Equal rooms once, with the numbers of their servers; the least headroom first."""
    found: dict[Room, list[int]] = {}
    for k, room in enumerate(rooms):
        found.setdefault(room, []).append(k)
    order = sorted(found.items(), key=lambda item: (item[0].headroom or 0.0, item[1]))
    return [(tuple(gpus), room) for room, gpus in order]


def spans(numbers: Sequence[int]) -> str:
    """Rising numbers for people: "0–2, 5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("–".join(map(str, span)) for span in found)
