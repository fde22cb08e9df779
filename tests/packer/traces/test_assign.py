"""Made-up workloads."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packer.errors import ValidationError
from packer.traces.assign import PowerLaw, generate_workload


@given(n=st.integers(1, 60), seed=st.integers(0, 1000))
def test_each_value_comes_equally_often(n: int, seed: int) -> None:
    """Rates and ranks of a set differ in count by at most one."""
    fleet = generate_workload(n, ranks=(8, 16), rates=(0.1, 0.05, 0.025), seed=seed)
    for column, values in ((fleet.rates, (0.1, 0.05, 0.025)), (fleet.ranks, (8, 16))):
        counts = Counter(column.tolist())
        assert set(counts) <= set(values)
        assert max(counts.values()) - min(counts.get(value, 0) for value in values) <= 1


@given(n=st.integers(1, 60), exponent=st.floats(0.0, 3.0))
def test_a_power_law_keeps_the_total(n: int, exponent: float) -> None:
    """The total rate is shared out whole, the first adapter getting most."""
    fleet = generate_workload(n, ranks=(8,), rates=PowerLaw(5.0, exponent))
    assert fleet.rate == pytest.approx(5.0)
    assert fleet.rates.argmax() == 0


def test_the_seed_decides() -> None:
    """The same seed gives the same fleet, another one a different one."""
    first, again, other = (generate_workload(50, ranks=(8, 16), rates=(0.1, 0.2), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("rates", [(), (-0.1,), PowerLaw(-1.0)])
def test_nonsense_is_refused(rates: tuple[float, ...] | PowerLaw) -> None:
    """A set of rates that is not empty, none negative, or a total above 0."""
    with pytest.raises(ValidationError):
        generate_workload(3, ranks=(8,), rates=rates)
