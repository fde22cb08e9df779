"""Sessions hold valid numbers, and say how long prompts get on average."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from packer import Adapter, Lengths, Sessions, Workload
from packer.errors import FileFormatError, ValidationError
from packer.io.workloads import read_workload, write_workload
from packer.twin.arrivals import replaying


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"turns": 0.5}, "turns"),
        ({"turns": math.nan}, "turns"),
        ({"turns": "4"}, "turns"),
        ({"turns": 4, "think_s": -1}, "think_s"),
        ({"turns": 4, "turn_tokens": 0}, "turn_tokens"),
    ],
)
def test_what_sessions_refuse(given: dict[str, object], what: str) -> None:
    """Numbers out of range are refused by name."""
    with pytest.raises(ValidationError, match=f"Expected {what}"):
        Sessions(**given)  # type: ignore[arg-type]


def test_an_adapter_takes_the_sessions_of_the_workload_unless_it_has_its_own() -> None:
    """`turns=1` of an adapter turns the workload's sessions off for it."""
    own = Sessions(turns=2)
    adapters = [
        Adapter("a", 8, 1.0),
        Adapter("b", 8, 1.0, sessions=own),
        Adapter("c", 8, 1.0, sessions=Sessions(1)),
    ]
    fleet = Workload(adapters, sessions=Sessions(turns=8))
    assert fleet.sessions_by_adapter == (Sessions(turns=8), own, None)
    assert fleet.has_sessions
    assert not Workload(adapters[2:]).has_sessions


def test_sessions_of_another_kind_are_refused() -> None:
    """A number in place of sessions is named."""
    with pytest.raises(ValidationError, match="sessions of adapter 'a'"):
        Adapter("a", 8, 1.0, sessions=4)  # type: ignore[arg-type]


def test_mean_prompts_grow_by_output_and_what_the_user_adds() -> None:
    """With geometric turns of mean m a request has m - 1 turns before it on average, by the sum over its place."""
    first, output, added, turns = 100.0, 30.0, 12.0, 5.0
    fleet = Workload(
        [Adapter("a", 8, 1.0, Lengths.constant(first), Lengths.constant(output))],
        sessions=Sessions(turns, turn_tokens=added),
    )
    going_on = 1.0 - 1.0 / turns
    shares = [going_on**k / turns for k in range(2000)]
    expected = sum(share * (first + k * (output + added)) for k, share in enumerate(shares))
    assert fleet.mean_input_tokens[0] == pytest.approx(expected)
    assert fleet.offered_tok_s == pytest.approx(expected + output)


def test_fleets_without_sessions_keep_their_fingerprint() -> None:
    """The field changes no fingerprint where it is not used."""
    plain = Workload([Adapter("a", 8, 1.0)])
    assert plain.fingerprint == "6ac0ac1dd89d4c60"
    assert Workload([Adapter("a", 8, 1.0)], sessions=Sessions(2)).fingerprint != plain.fingerprint


def test_independent_requests_have_the_same_mean_prompts() -> None:
    """Without sessions the offered load is the same; with a cache that keeps all, only new tokens are left."""
    sessions = Sessions(turns=4, turn_tokens=40)
    fleet = Workload(
        [Adapter("a", 8, 1.0, Lengths.constant(200), Lengths.constant(50), shared_prefix_tokens=80)], sessions=sessions
    )
    whole, left = (fleet.as_independent(cached=cached) for cached in (False, True))
    assert not whole.has_sessions
    assert whole.offered_tok_s == pytest.approx(fleet.offered_tok_s, rel=1e-3)
    assert left.mean_input_tokens[0] == pytest.approx((120 + 3 * 40) / 4)


@pytest.mark.parametrize("ending", [".csv", ".json", ".yaml", ".parquet"])
def test_sessions_round_trip(tmp_path: Path, ending: str) -> None:
    """Sessions of adapters come back from a file; a table gives each adapter those of the workload."""
    given = Sessions(turns=3.5, think_s=12.0, turn_tokens=50.0)
    fleet = Workload([Adapter("a", 8, 1.0, sessions=given), Adapter("b", 8, 1.0)], name="fleet")
    write_workload(fleet, tmp_path / f"fleet{ending}")
    assert read_workload(tmp_path / f"fleet{ending}") == fleet
    whole = replace(fleet, sessions=Sessions(turns=2.0))
    write_workload(whole, tmp_path / f"whole{ending}")
    assert read_workload(tmp_path / f"whole{ending}").sessions_by_adapter == whole.sessions_by_adapter
    assert read_workload(tmp_path / f"whole{ending}").sessions_by_adapter[1] == Sessions(turns=2.0)


def test_think_time_without_turns_is_refused(tmp_path: Path) -> None:
    """A cell about sessions needs the number of turns in its row."""
    (tmp_path / "fleet.csv").write_text("adapter,rank,rate,turns,think_s\na,8,1,4,10\nb,8,1,,10\n")
    with pytest.raises(FileFormatError, match="expected turns with it"):
        read_workload(tmp_path / "fleet.csv")


def test_the_requests_of_drawn_sessions_round_trip(tmp_path: Path) -> None:
    """A trace keeps blocks and sessions in a document."""
    fleet = Workload([Adapter("a", 8, 1.0)], sessions=Sessions(turns=3.0), name="fleet")
    drawn = replaying(fleet, 50.0, 0)
    write_workload(drawn, tmp_path / "fleet.json")
    assert read_workload(tmp_path / "fleet.json").fingerprint == drawn.fingerprint
