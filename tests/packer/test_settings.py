"""How a server is started."""

from __future__ import annotations

import pytest

from packer.bin import Bin
from packer.errors import ValidationError
from packer.profile import Profile
from packer.settings import Settings


@pytest.mark.parametrize("pair", [(-1, 8), (100_001, 8), (1, 24), (1, 0), (1.5, 8), (True, 8)])
def test_values_that_no_server_takes_are_refused(toy_profile: Profile, pair: tuple[int, int]) -> None:
    """`max_loras` is at least 0 (LoRA is off), `max_lora_rank` one of vLLM's values, however they are made."""
    with pytest.raises(ValidationError, match=r"max_loras|max_lora_rank"):
        Settings(*pair)
    with pytest.raises(ValidationError, match=r"max_loras|max_lora_rank"):
        toy_profile.settings(*pair)


def test_a_bin_has_the_settings_of_a_profile(toy_profile: Profile) -> None:
    """A bin shows the two numbers of its settings; a pair of numbers is refused."""
    bin_ = Bin((0,), toy_profile.settings(4, 16), toy_profile)
    assert (bin_.max_loras, bin_.max_lora_rank) == (4, 16)
    with pytest.raises(ValidationError, match=r"to be a Settings, as profile\.settings"):
        Bin((0,), (4, 16), toy_profile)  # type: ignore[arg-type]
