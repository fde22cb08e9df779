from __future__ import annotations

import numpy as np
import pytest

from packer.errors import ValidationError
from packer.traces.pattern import RateTable, loads_text, rates_of
from packer.traces.trace import Trace


def trace(times: list[float], adapters: list[int], names: tuple[str, ...]) -> Trace:
    """Requests of 100 + 10 tokens."""
    n = len(times)
    tokens = np.full(n, 100, dtype=np.int64)
    return Trace(np.array(times), tokens, tokens // 10, np.array(adapters, dtype=np.int64), names)


def test_requests_are_counted_in_windows() -> None:
    """Rates are requests / window, in whole windows only, aligned to the clock."""
    seen = rates_of(trace([0, 50, 60, 70, 130, 170, 190], [0, 0, 0, 1, 1, 1, 0], ("a", "b")), 60.0)
    assert seen.start_s.tolist() == [60.0, 120.0]
    np.testing.assert_allclose(seen.rates, [[1 / 60, 1 / 60], [0, 2 / 60]])
    np.testing.assert_allclose(seen.tokens, [110, 110])


def test_windows_follow_the_clock() -> None:
    """A log that starts at 10:59:30 has its first whole hour at 11:00."""
    start = 10 * 3600 + 3570.0
    seen = rates_of(trace([0, 31, 3000, 4000, 7400], [0] * 5, ("a",)), 3600.0, start_s=start)
    assert seen.start_s.tolist() == [11 * 3600.0, 12 * 3600.0][: len(seen.start_s)]


def test_loads_are_hours_that_happened() -> None:
    """Mean, percentile and peak are rate vectors of windows; each-peak is every adapter's own maximum."""
    rates = np.array([[1.0, 1.0], [5.0, 0.0], [0.0, 4.0], [2.0, 2.0]])
    table = RateTable(("a", "b"), rates, np.array([10.0, 10.0]), np.arange(4.0), 1.0)
    loads = table.loads([50.0])
    assert loads["mean"].tolist() == [2.0, 1.75]
    assert loads["peak"].tolist() == [5.0, 0.0]
    assert loads["p50"].tolist() in rates.tolist()
    assert loads["each-peak"].tolist() == [5.0, 4.0]
    assert (loads["each-peak"] >= loads["peak"]).all()


def test_days_are_averaged_by_their_hours() -> None:
    """Two days of a daily wave give one day whose hours are the means."""
    hours = np.arange(48)
    rates = np.array([[h % 24 + (1.0 if h < 24 else 3.0)] for h in hours])
    table = RateTable(("a",), rates, np.ones(1), hours * 3600.0, 3600.0)
    day = table.by_time_of_day()
    assert day.rates[:, 0].tolist() == [h + 2.0 for h in range(24)]


def test_loads_file_is_what_headroom_reads(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The CSV goes into the objective headroom, whatever the adapters are called."""
    from packer.adapter import Adapter
    from packer.objectives.headroom import Headroom
    from packer.workload import Workload

    names = ("a", 'b,"c"', "d\ne")
    path = tmp_path / "loads.csv"
    path.write_text(loads_text(names, {"mean": np.array([1.0, 2.0, 0.0]), "peak": np.array([2.0, 4.0, 1.0])}))
    fleet = Workload([Adapter(name, 8, 1.0) for name in names])
    found = Headroom(factor=1.5, rates=str(path)).loads(fleet)
    np.testing.assert_allclose(found[1].rates, [3.0, 6.0, 1.5])


def test_too_many_windows_are_refused() -> None:
    """A slip in the unit of time must not eat the memory."""
    with pytest.raises(ValidationError, match="longer window"):
        rates_of(trace([0, 1e9], [0, 0], ("a",)), 1.0)
