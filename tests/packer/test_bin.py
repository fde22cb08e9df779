"""Bins and evaluations."""

from __future__ import annotations

import math

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.errors import ValidationError
from packer.profile import Profile
from packer.settings import Settings
from packer.workload import Workload

FLEET = Workload([Adapter(f"a{k}", 8, 0.1 * (k + 1)) for k in range(4)])


def test_a_bin_carries_its_part_of_the_load(toy_profile: Profile) -> None:
    """Offered load and rates of a bin are those of the workload it is given to simulate."""
    for shares in ((), (0.25, 1.0)):
        item = Bin((2, 0), Settings(2, 8), toy_profile, shares)
        own = item.workload(FLEET)
        assert own.names == ("a2", "a0")
        assert item.offered_tok_s(FLEET) == pytest.approx(own.offered_tok_s)
        assert item.rates(FLEET) == pytest.approx(own.rates)
        assert item.requests_s(FLEET) == pytest.approx(own.rate)


def test_the_whole_fleet_is_not_copied(toy_profile: Profile) -> None:
    """A bin of all adapters in order is the fleet itself, so that caches hit."""
    assert Bin((0, 1, 2, 3), Settings(4, 8), toy_profile).workload(FLEET) is FLEET


@pytest.mark.parametrize(
    "options",
    [
        {"adapters": ()},
        {"adapters": (1, 1)},
        {"adapters": (-1,)},
        {"settings": (1, 8)},
        {"shares": (0.5, 0.5)},
        {"shares": (0.0,)},
        {"shares": (1.5,)},
        {"shares": (math.nan,)},
    ],
)
def test_nonsense_is_refused(toy_profile: Profile, options: dict[str, object]) -> None:
    """A server that vLLM would not start, or shares that aren't shares, never become a bin."""
    good = {"adapters": (0,), "settings": Settings(1, 8), "profile": toy_profile}
    with pytest.raises(ValidationError):
        Bin(**(good | options))  # type: ignore[arg-type]


def test_lists_and_arrays_make_equal_bins(toy_profile: Profile) -> None:
    """A bin of a list or an array is the bin of the tuple: equal, with the same hash, of Python's numbers."""
    settings, made = (toy_profile.settings(4, 16), Bin((0, 1), toy_profile.settings(4, 16), toy_profile, (1.0, 0.5)))
    for kind in (list, np.array):
        assert len({made, Bin(kind([0, 1]), settings, toy_profile, kind([1.0, 0.5]))}) == 1


def test_a_renumbered_bin_keeps_its_shares(toy_profile: Profile) -> None:
    """Adapters without a number are left out; a bin without any is none."""
    item = Bin((3, 5, 8), toy_profile.settings(2, 8), toy_profile, (0.5, 1.0, 0.25))
    assert item.renumbered({5: 0, 8: 1}) == Bin((0, 1), item.settings, toy_profile, (1.0, 0.25))
    assert item.renumbered({4: 0}) is None
    assert item.under({3: 1, 5: 0, 8: 2}) == Bin((1, 0, 2), item.settings, toy_profile, item.shares)
    assert Bin((2, 0), item.settings, toy_profile, (0.5, 1.0)).under((3, 5, 8)).adapters == (8, 3)
