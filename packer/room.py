"""Room to grow of a server: how far its load may grow, what limits it, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEVELS = tuple(round(1.08**k, 4) for k in range(19))  # Factors on the rates at which room to grow is evaluated.


def levels_of(margin: float | None) -> tuple[float, ...]:
    """`LEVELS` for a plan, with the factor of its margin among them, which it keeps, if that exceeds the first step."""
    factor = 1.0 + (margin or 0.0)
    return LEVELS if factor <= LEVELS[1] else tuple(sorted({*LEVELS, factor}))


@dataclass(frozen=True, slots=True)
class Room:
    """Room to grow of one server.

    `headroom`: largest evaluated factor on all rates at which its adapters keep their latency limits, no queue grows
    and it does not starve; None if that fails at the given rates.
    `limit`: what limits the server first: "slots", "KV cache", "batch", "prefill", "loading", "step time", "bursts",
    "front end", "start" or "first use".
    `usage`: how much of the limiting resource is used at the first load that breaks this, in words.
    `advice`: what would help, in words; "" if nothing is known.
    """

    headroom: float | None
    limit: str = ""
    usage: str = ""
    advice: str = ""


def grouped(rooms: Sequence[Room]) -> list[tuple[tuple[int, ...], Room]]:
    """The distinct rooms, each with the numbers of its servers; the least headroom comes first."""
    found: dict[Room, list[int]] = {}
    for k, room in enumerate(rooms):
        found.setdefault(room, []).append(k)
    order = sorted(found.items(), key=lambda item: (item[0].headroom or 0.0, item[1]))
    return [(tuple(gpus), room) for room, gpus in order]


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: "0–2, 5"."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ", ".join("–".join(map(str, span)) for span in found)


def growth(factor: float | None) -> str:
    """A factor on the rates in words: "+23%"; "> +300%" for the largest factor evaluated; "none" for None."""
    if factor is None:
        return "none"
    return f"{'> ' if factor >= LEVELS[-1] else ''}+{factor - 1.0:.0%}"


def reached(factor: float) -> str:
    """Up to what factor of those evaluated a plan holds, in words: "over +300 %", "about +17 %", "less than +8 %"."""
    if factor > 1.0:
        return f"{'over' if factor >= LEVELS[-1] else 'about'} +{100 * (factor - 1.0):.0f} %"
    return f"less than +{100 * (LEVELS[1] - 1.0):.0f} %"


def holding(rooms: Sequence[Room]) -> str:
    """Up to what load the goal holds, in words."""
    return f"holds to {reached(min(room.headroom or 0.0 for room in rooms))}" if rooms else "holds"


def room_rows(rooms: Sequence[Room], most: int | None = None) -> list[tuple[str, ...]]:
    """Rows for the `most` groups of equal servers with the least room: numbers, headroom, limit and its use, advice."""
    return [
        (
            spans(gpus),
            growth(room.headroom),
            f"{room.limit}: {room.usage}" if room.limit else "–",
            room.advice or "–",
        )
        for gpus, room in sorted(grouped(rooms)[:most], key=lambda row: row[0])
    ]
