"""Named seeds, derived from the seed that a user gives, one for each random stream.

Streams are this far apart so that none meets another for any seed that people type.
"""

from __future__ import annotations

_FRESH, _CONFIRMING, _FURTHER, _EVALUATING, _SERVER = 1_000_003, 17, 7919, 500_009, 15_485_863


def fresh(seed: int, number: int = 1) -> int:
    """Of the `number`-th hour, from 1, that no search has used: plans are verified in it."""
    return seed + _FRESH * number


def of_server(seed: int, first: int) -> int:
    """Return the seed of one server in a fresh hour; `first` is the index of its first adapter."""
    return seed + _SERVER * (1 + first)


def evaluating(seed: int) -> int:
    """Of the hour in which a plan is evaluated, which neither its search nor its verification has used."""
    return seed + _EVALUATING


def confirming(seed: int) -> int:
    """Of the hour in which a solver confirms its own bins before they are verified."""
    return fresh(seed) + _CONFIRMING


def further(seed: int, number: int) -> int:
    """Of the `number`-th run, from 0, of the same server or of the `number`-th period of a day."""
    return seed + _FURTHER * number
