"""How far a trend goes on: as far as such trends did."""

from __future__ import annotations

import numpy as np
import pytest

from packer.operate.trend import STEEPEST, expected_tok_s

AHEAD_S, WINDOW_S, PERIOD_S = 480.0, 600.0, 60.0


def expected(load: np.ndarray) -> np.ndarray:
    """The forecast of each minute of a load by minute, tok/s, from its minute 20 on, with four hours of memory."""
    total = np.concatenate([[0.0], np.cumsum(load)])
    mean = (total[10:] - total[:-10]) / 10.0
    rows = [(60.0 * m, float(mean[m]), float(mean[m - 10])) for m in range(10, len(mean))]
    past = [rows[max(0, k - 239) : k + 1] for k in range(len(rows))]
    return np.array([expected_tok_s(each, AHEAD_S, WINDOW_S, PERIOD_S) for each in past])


@pytest.mark.parametrize("minutes", [20, 30, 40, 60])
def test_a_load_that_falls_again_each_time_is_not_expected_to_rise_on(minutes: int) -> None:
    """After the first cycle the forecast stays near the highest load that there was: it began a server each cycle."""
    load = 1500.0 * (1.0 + 0.2 * np.sin(2.0 * np.pi * np.arange(12 * 60) / minutes))
    assert expected(load)[2 * minutes :].max() < 1.06 * load.max()


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("minutes", [10, 60, 120])
def test_a_rise_without_an_example_goes_on_in_full(minutes: int, noise: float) -> None:
    """After hours of a steady load, a step or a morning's rise is extrapolated as if the past were unknown."""
    load = np.interp(np.arange(9 * 60), [0, 360, 360 + minutes], [1000.0, 1000.0, 3000.0])
    load *= 1.0 + noise * np.random.default_rng(0).uniform(-1.0, 1.0, len(load))
    mean = np.convolve(load, np.full(10, 0.1), "valid")
    now, before = mean[10:], mean[:-10]
    full = now + np.clip((now - before) * AHEAD_S / WINDOW_S, 0.0, STEEPEST * now)
    rise = slice(350, 340 + minutes)
    assert expected(load)[rise] == pytest.approx(full[rise], rel=0.015 if noise else 1e-6)


def test_rises_that_came_are_expected_to_come_beyond_the_largest_load() -> None:
    """A load that grows for hours is extrapolated in full; without a look in the past the present rise is."""
    load = 1000.0 + 2.0 * np.arange(6 * 60)
    assert expected(load)[-1] == pytest.approx(load[-1] - 9.0 + 20.0 * 0.8)
    assert expected_tok_s([(0.0, 1100.0, 1000.0)], AHEAD_S, WINDOW_S, PERIOD_S) == pytest.approx(1180.0)
    assert expected_tok_s([(0.0, 1000.0, 1100.0)], AHEAD_S, WINDOW_S, PERIOD_S) == pytest.approx(1000.0)
