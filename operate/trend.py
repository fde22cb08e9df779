"""The load to expect when a server that is started now would serve: its trend goes on as far as such trends did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STEEPEST = 0.25  # Maximum share of the recent load that its trend adds to it.
SIMILAR = 0.75  # Rises of the past count that were at least this share of the present one.


def expected_tok_s(
    past: Sequence[tuple[float, float, float]], ahead_s: float, window_s: float, period_s: float
) -> float:
    """The load to expect after `ahead_s`, tok/s.

    `past`: at each look of the last hours, the present one last: time (s), and load (tok/s) in the window that ends
    then and in the one before it. `window_s`, `period_s`: length of a window; time between two looks.
    The rise from window to window goes on in full up to the largest load of `past`, beyond it by the share of earlier
    rises like it that came (the slope of the line through 0 which fits best). A rise counts as one that came, too, for
    the looks of one window, and is expected in full if none was like it.
    """
    at_s, load, before = np.array(past).T
    rises = np.clip((load - before) * ahead_s / window_s, 0.0, STEEPEST * load)
    now, rise = float(load[-1]), float(rises[-1])
    then = np.searchsorted(at_s, at_s + ahead_s)
    of = np.flatnonzero((then < len(at_s)) & (rises >= SIMILAR * rise))
    known, came = rises[of], load[then[of]] - load[of]
    prior = rise**2 * window_s / period_s
    share = (prior + float(known @ came)) / max(prior + float(known @ known), 1e-9)
    # Where the load rises and falls by as much, its peak is a quarter of that above the mean of the window around it.
    peak = float(load.max()) + 0.25 * max(float((load - before).max()), 0.0)
    return max(now + min(max(share, 0.0), 1.0) * rise, min(now + rise, peak))
