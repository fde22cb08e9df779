"""JSON and YAML without their traps."""

from __future__ import annotations

import pytest

from packer.errors import FileFormatError
from packer.io.documents import parse_json, parse_yaml


def test_a_key_given_twice_is_an_error() -> None:
    """JSON's last-one-wins hides mistakes."""
    with pytest.raises(FileFormatError, match="'rate' appears twice"):
        parse_json('{"rate": 1, "rate": 2}', "f.json")


def test_json_errors_have_a_row() -> None:
    """A cut or broken text says where it breaks."""
    with pytest.raises(FileFormatError, match=r"f\.json, row 2: expected JSON"):
        parse_json('{"a":\n[1, }', "f.json")


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000, "[" * 1000 + "]" * 999])
def test_monsters_are_refused(text: str) -> None:
    """Deep nesting and endless numbers end in our error."""
    with pytest.raises(FileFormatError):
        parse_json(text, "f.json")


def test_yaml_numbers_are_numbers() -> None:
    """1e-3 is a number, as in YAML 1.2, JSON and everybody's mind."""
    values = parse_yaml("[1e-3, 2, 3.5, .5, -1.0e+2, abc, 1e3x]", "f.yaml")
    assert values == [0.001, 2, 3.5, 0.5, -100.0, "abc", "1e3x"]
    assert type(values[1]) is int


def test_yaml_aliases_are_refused() -> None:
    """A billion laughs never starts."""
    text = "a: &a [x, x]\nb: &b [*a, *a]\n"
    with pytest.raises(FileFormatError, match=r"f\.yaml, row 2: YAML aliases"):
        parse_yaml(text, "f.yaml")


@pytest.mark.parametrize(
    "text", ["a: [", "\t- x", "2023-99-99", "? [x]: y", "!!python/object:os.system x", "a: b: c"]
)
def test_bad_yaml_is_refused(text: str) -> None:
    """Whatever the library raises becomes our error; no tag makes an object."""
    with pytest.raises(FileFormatError, match="expected YAML"):
        parse_yaml(text, "f.yaml")
