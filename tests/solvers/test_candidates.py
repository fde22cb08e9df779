"""Values of max_loras: all small ones, few between larger ones, none that is of no use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.io.profiles import load_profile
from packer.lengths import Lengths
from packer.profile import Profile
from packer.settings import Settings
from packer.solvers.candidates import (
    EVERY,
    LADDER,
    ignored_words,
    max_loras_candidates,
    most_slots_of,
    neighbours,
    tried_words,
)
from packer.twin.memory.policy import memory_error
from packer.twin.override import with_engine
from packer.workload import Workload


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        (1, (1,)),
        (7, (1, 2, 3, 4, 6, 7)),
        (8, (1, 2, 3, 4, 6, 8)),
        (20, (1, 2, 3, 4, 6, 8, 12, 16, 20)),
        (384, LADDER),
    ],
)
def test_candidates_go_from_one_slot_to_one_for_each_adapter(
    server: Profile, adapters: int, expected: tuple[int, ...]
) -> None:
    """No more slots than adapters are tried, and one slot for each adapter always is."""
    assert max_loras_candidates(adapters, server, 8) == expected

    other = replace(server, engine=replace(server.engine, name="sglang", prefix_caching=None))
    found = max_loras_candidates(adapters, other, 8)
    assert found == tuple(sorted({*expected, max(1, adapters - 1)}))  # requests to the base model take one


def test_proofs_try_every_value_of_small_servers(server: Profile) -> None:
    """And say which ones they tried of larger ones."""
    assert max_loras_candidates(13, server, 8, proof=True) == tuple(range(1, 14))
    found = max_loras_candidates(40, server, 8, proof=True)
    assert found == (*range(1, EVERY + 1), 24, 32, 40)
    words = tried_words(40)
    assert all(f" {value}," in words for value in found[EVERY:-1])


@pytest.mark.parametrize("rank", [8, 64, 320])
def test_no_more_slots_than_the_server_starts_with(server: Profile, rank: int) -> None:
    """The most with which it starts is a candidate, and nothing beyond."""
    most = most_slots_of(server, rank)
    starts = [memory_error(server, server.settings(n, rank)) is None for n in (most, most + 1)]
    assert starts == [True, False]
    assert max_loras_candidates(100_000, server, rank)[-1] == most


@pytest.mark.parametrize(("slots", "steps", "expected"), [
    (8, 2, (16, 12)), (8, -2, (4, 6)), (9, 2, (16, 12)), (9, -1, (8,)), (20, 2, ()), (1, -2, ()), (1, 1, (2,)),
])  # fmt: skip
def test_neighbours_of_a_number_of_slots(server: Profile, slots: int, steps: int, expected: tuple[int, ...]) -> None:
    """The nearest candidates above or below, farthest first, also of a number that is none itself."""
    assert neighbours(Bin(tuple(range(20)), Settings(slots, 8), server), steps) == expected


def test_servers_cut_only_the_requests_for_their_base_model(server: Profile) -> None:
    """Long requests for a model whose servers take them are not said to be cut to the context of another model's
    servers."""
    qwen = with_engine(load_profile("h100-64gb/qwen-2.5-7b-instruct"), max_model_len=2048)
    lengths = [Lengths.constant(3000), Lengths.constant(100)]
    long = Adapter("long", 8, 1.0, *lengths, model=server.model.name)
    short = Adapter("short", 8, 1.0, Lengths.constant(100), Lengths.constant(100), model=qwen.model.name)
    assert not ignored_words(Workload([long, short]), [server, qwen])
    (words,) = ignored_words(Workload([long, replace(short, input_tokens=lengths[0])]), [server, qwen])
    assert words.startswith("100.0% of the requests have more than 2,048 tokens")


def test_prompts_that_are_no_longer_than_their_shared_prefix_are_named() -> None:
    """Such prompts would cost nothing but their answers, which a prefix that is left out of input_tokens makes of all;
    where prompts are longer, or no server caches prefixes, nothing is said."""
    old = load_profile("h100-64gb/llama-3.1-8b-instruct")
    caching = with_engine(old, vllm_version="0.30.0")
    for mean, profile, said in ((600.0, caching, True), (4000.0, caching, False), (600.0, old, False)):
        prompts = Lengths.gamma(mean=mean, cv=0.5)
        fleet = Workload([Adapter("a", 8, 1.0, prompts, shared_prefix_tokens=1000), Adapter("b", 8, 1.0, prompts)])
        words = [each for each in ignored_words(fleet, [profile]) if "shared prefix of their adapter" in each]
        assert len(words) == said
        assert not said or words[0].startswith(("46%", "47%"))
