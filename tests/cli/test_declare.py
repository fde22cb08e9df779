"""Commands declared by bundles."""

from __future__ import annotations

import click
import pytest

from packer.cli.declare import bundle, flag, option, parameters


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
