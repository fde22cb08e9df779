"""How far the load of a server may grow, what limits it, and what helps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """Of one server.

    Parameters
    ----------
    slo, queue, starvation
        Largest factor of all its rates, of those tried, at which its adapters keep their latency limits; at which
        no queue grows; at which it does not starve. None where that fails at the rates as given.
    limit
        What limits the server first: "slots", "KV cache", "batch", "prefill", "loading", "step time", "bursts" or
        "front end".
    usage
        How much of it is in use at the load where the latency limits break, in words.
    advice
        What would help, in words; "" where nothing is known.
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
