"""Named seeds for independent random streams, derived from the seed that a user gives. The offsets are so far apart
that no two streams share a seed for any seed that users choose."""

from __future__ import annotations

_FRESH, _CONFIRMING, _FURTHER, _EVALUATING, _SERVER = 1_000_003, 17, 7919, 500_009, 15_485_863


def fresh(seed: int, number: int = 1) -> int:
    """Seed of the `number`-th fresh hour, counted from 1. No search uses these hours; plans are verified in them."""
    return seed + _FRESH * number


def of_server(seed: int, first: int) -> int:
    """Return the seed of one server in a fresh hour; `first` is the index of its first adapter."""
    return seed + _SERVER * (1 + first)


def evaluating(seed: int) -> int:
    """Seed of the hour in which a plan is evaluated; neither search nor verification uses it."""
    return seed + _EVALUATING


def confirming(seed: int) -> int:
    """Seed of the hour in which a solver confirms its own bins before they are verified."""
    return fresh(seed) + _CONFIRMING


def further(seed: int, number: int) -> int:
    """Seed of the `number`-th run of a server, or of the `number`-th period of a day, counted from 0."""
    return seed + _FURTHER * number
