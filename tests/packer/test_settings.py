"""How a server is started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.bin import Bin
from packer.errors import ValidationError
from packer.profile import Profile
from packer.settings import Pool, Slots


@pytest.mark.parametrize("pair", [(-1, 8), (100_001, 8), (1, 24), (1, 0), (1.5, 8), (True, 8)])
@pytest.mark.parametrize("kind", [Slots, Pool])
def test_values_that_no_server_takes_are_refused(kind: type[Slots | Pool], pair: tuple[int, int]) -> None:
    """`max_loras` is at least 0 (LoRA is off), `max_lora_rank` one of vLLM's values."""
    with pytest.raises(ValidationError, match=r"max_loras|max_lora_rank"):
        kind(*pair)


@pytest.mark.parametrize(("policy", "kind"), [("reserved", Slots), ("unified", Pool)])
def test_the_profile_chooses_the_kind(toy_profile: Profile, policy: str, kind: type[Slots | Pool]) -> None:
    """A bin takes the settings of its profile's memory policy and no other."""
    memory = replace(toy_profile.memory, policy=policy)  # type: ignore[arg-type]
    profile = replace(toy_profile, memory=memory)
    settings = profile.settings(4, 16)
    assert type(settings) is kind
    bin_ = Bin((0,), settings, profile)
    assert (bin_.max_loras, bin_.max_lora_rank) == (4, 16)
    with pytest.raises(ValidationError, match=f"to be {kind.__name__}"):
        Bin((0,), (Pool if kind is Slots else Slots)(4, 16), profile)


def test_kinds_are_different_settings() -> None:
    """A slot server and a pool server with the same numbers never share a cached result."""
    assert Slots(4, 16) != Pool(4, 16)
    assert Slots(4, 16) == Slots(4, 16)
