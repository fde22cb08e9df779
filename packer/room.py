"""How far the load of a server may grow, what limits it, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = tuple(round(1.08**k, 4) for k in range(19))
"""Factors of the rates at which room to grow is looked for."""


@dataclass(frozen=True, slots=True)
class Room:
    """Of one server.

    `slo`, `queue`, `starvation`: largest factor of all its rates, of those tried, at which its adapters keep their
    latency limits; at which no queue grows; at which it does not starve. None where that fails at the rates as given.
    `limit`: what limits the server first: "slots", "KV cache", "batch", "prefill", "loading", "step time", "bursts",
    "front end", "start" or "first use".
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


def growth(factor: float | None) -> str:
    """A factor of the rates for people, "+23%"; "> +300%" where no larger one was tried; "none" where 1 is too much."""
    if factor is None:
        return "none"
    return f"{'> ' if factor >= LEVELS[-1] else ''}+{factor - 1.0:.0%}"


def room_rows(rooms: Sequence[Room], most: int | None = None) -> list[tuple[str, ...]]:
    """For `most` groups of equal servers, those with the least room: numbers, the three marks, what limits them at
    which load, and what helps."""
    return [
        (
            spans(gpus),
            *(growth(factor) for factor in (room.slo, room.queue, room.starvation)),
            f"{room.limit}: {room.usage}" if room.limit else "–",
            room.advice or "–",
        )
        for gpus, room in sorted(grouped(rooms)[:most], key=lambda row: row[0])
    ]
