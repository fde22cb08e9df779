"""JSON and YAML without their traps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from packer.errors import FileFormatError
from packer.io.documents import parse_json, parse_toml, parse_yaml, yaml_text


def test_a_key_given_twice_is_an_error() -> None:
    """JSON's last-one-wins hides mistakes."""
    with pytest.raises(FileFormatError, match="'rate' appears twice"):
        parse_json('{"rate": 1, "rate": 2}')


def test_json_errors_have_a_row() -> None:
    """A cut or broken text says where it breaks."""
    with pytest.raises(FileFormatError, match=r"^row 2: expected JSON"):
        parse_json('{"a":\n[1, }')


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 5000, "[" * 1000 + "]" * 999])
def test_monsters_are_refused(text: str) -> None:
    """Deep nesting and endless numbers end in our error."""
    with pytest.raises(FileFormatError):
        parse_json(text)


def test_yaml_numbers_are_numbers() -> None:
    """1e-3 is a number, as in YAML 1.2 and JSON."""
    values = parse_yaml("[1e-3, 2, 3.5, .5, -1.0e+2, abc, 1e3x]")
    assert values == [0.001, 2, 3.5, 0.5, -100.0, "abc", "1e3x"]
    assert type(values[1]) is int


WORDS = "1e3 1E5 2e10 12e03 1e+3 1.5e3 .5 5. 1_000 0x1f 010 yes No on null ~ true 1:30 2024-01-01 = << .nan -.inf"
ODD = (
    *WORDS.split(),
    " a",
    "a ",
    "",
    "- a",
    "a: b",
    "a #b",
    "\u00e9\U0001f600",
    "\u2028",
    "\ufeff",
    "'",
    '"',
)
text = st.text(st.characters(exclude_categories=["Cs", "Cc"])) | st.sampled_from(ODD)


@given(st.lists(text | st.floats(-1e300, 1e300)))
@example(ODD)
def test_yaml_that_is_written_is_read_again(values: Sequence[str | float]) -> None:
    """Text stays text and a number a number, whatever the text looks like to a version of YAML."""
    data = {"values": list(values), "keys": {str(value): value for value in values}}
    assert parse_yaml(yaml_text(data)) == data


def test_yaml_aliases_are_refused() -> None:
    """A billion laughs never starts."""
    text = "a: &a [x, x]\nb: &b [*a, *a]\n"
    with pytest.raises(FileFormatError, match=r"^row 2: YAML aliases"):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["a: [", "\t- x", "? [x]: y", "!!python/object:os.system x", "a: b: c"])
def test_bad_yaml_is_refused(text: str) -> None:
    """Whatever the library raises becomes our error; no tag makes an object."""
    with pytest.raises(FileFormatError, match="expected YAML"):
        parse_yaml(text)


@pytest.mark.parametrize("text", ["1:30", "010", "0x10", "1_000", "on", "no", "2024-05-01", "<<", "="])
def test_what_yaml_versions_read_differently_stays_text(text: str) -> None:
    """A rate of 1:30 must not become 90, a rank of 010 not 8, and an adapter called `no` not false."""
    assert parse_yaml(f"a: {text}") == {"a": text}


def test_yaml_keeps_null_and_truth_values() -> None:
    """The words of the core schema mean what they say."""
    assert parse_yaml("[null, ~, true, False, ]") == [None, None, True, False]


@pytest.mark.parametrize("text", ["rate: 1\nrate: 2", "{a: 1, a: 2}", "- {x: {y: 1, 'y': 2}}"])
def test_a_yaml_key_given_twice_is_an_error(text: str) -> None:
    """YAML's last-one-wins hides mistakes, too."""
    with pytest.raises(FileFormatError, match="appears twice"):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_json, "[" * 65 + "]" * 65),
        (parse_json, '{"a":' * 65 + "1" + "}" * 65),
        (parse_yaml, "[" * 65 + "]" * 65),
        (parse_yaml, "[" * 100_000),
        (parse_toml, "a = " + "[" * 65 + "]" * 65),
        (parse_toml, "a = " + "[" * 100_000),
        (parse_toml, "[" + ".".join("a" * 65) + "]"),
    ],
)
def test_nesting_is_bounded(parse: Callable[[str], object], text: str) -> None:
    """What comes after the parser may recurse: 64 levels are more than any of packer's files has."""
    with pytest.raises(FileFormatError, match=r"^(row 1: )?expected"):
        parse(text)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_json_numbers_are_finite(text: str) -> None:
    """JSON has no NaN; Python's reader takes it."""
    with pytest.raises(FileFormatError, match="expected a finite number"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["a" + ".a" * 40_000 + "=1", '"a"' + ' . "a"' * 70 + "=1", "x={a" + ".'b c'" * 70 + "=1}"]
)
def test_a_toml_key_of_many_parts_is_refused(text: str) -> None:
    """It is refused before it is parsed, which would take a minute and gigabytes."""
    with pytest.raises(FileFormatError, match="at most 64 lists and objects"):
        parse_toml(text)


def test_long_words_and_keys_of_several_parts_are_read() -> None:
    """What is looked for is looked for in linear time."""
    assert parse_toml(f'a.b."c d" = "{"x" * 1_000_000}"\n[t.u]\nv = 1.5') == {
        "a": {"b": {"c d": "x" * 1_000_000}},
        "t": {"u": {"v": 1.5}},
    }
