"""Commands declared by bundles."""

from __future__ import annotations

import click
import pytest

from packer.cli.declare import Command, bundle, flag, option, pairs, parameters


def test_help_is_the_line_of_the_docstring() -> None:
    """An option is explained by its line of the docstring, also of a base class; lines are joined."""

    @bundle
    class Base:
        """Shared.

        size: How large. [default: one]
        """

        size: int | None = option()

    @bundle
    class Given(Base):
        """Own.

        fast: Sooner,
            at a price.
        """

        fast: bool = flag()

    found = {each.name: each.help for each in parameters(Given) if isinstance(each, click.Option)}
    assert found == {"size": "How large.  [default: one]", "fast": "Sooner, at a price."}


def test_a_line_about_no_option_is_refused() -> None:
    """A misspelt name in a docstring would leave its option without help."""

    @bundle
    class Given:
        """Own.

        sise: How large.
        """

        size: int | None = option()

    with pytest.raises(TypeError, match="sise"):
        parameters(Given)


def test_a_name_of_pairs_is_an_option_of_its_own() -> None:
    """`--size 8`, `--size=8` and `--set size=8` are the same; what is no name, no value or given twice is refused."""

    @bundle
    class Given:
        """Own.

        settings: Sizes.
        """

        settings: dict[str, int] = pairs("--set", names={"size": int, "max-size": click.IntRange(max=9)})

    seen: list[dict[str, int]] = []
    found = Command("x", params=parameters(Given), callback=lambda settings: seen.append(settings))
    for words in ("--size 8", "--size=8", "--set size=8"):
        found.main(words.split(), standalone_mode=False)
    found.main(["--set", "max_size=3"], standalone_mode=False)
    found.main([], standalone_mode=False)
    assert seen == [*[{"size": 8}] * 3, {"max_size": 3}, {}]
    twice = "--set size=1 --size 8", "--set max_size=9 --max-size 3"
    for words in ("--size", "--size x", "--set size", "--set other=3", "--max-size 10", *twice):
        with pytest.raises(click.UsageError):
            found.main(words.split(), standalone_mode=False)
