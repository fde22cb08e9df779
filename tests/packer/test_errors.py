"""The tree of errors and what messages say."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from packer import errors
from packer.cli import run


def test_one_root_and_familiar_bases() -> None:
    """Everything raised on purpose is a PackerError; input errors are also what Python programs catch."""
    kinds = [value for value in vars(errors).values() if isinstance(value, type)]
    raised = [k for k in kinds if issubclass(k, Exception) and not issubclass(k, Warning)]
    assert all(issubclass(kind, errors.PackerError) for kind in raised)
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.ModelError, errors.InputError)
    assert not issubclass(errors.LiveError, errors.InputError)
    assert issubclass(errors.UnknownNameError, LookupError)
    assert issubclass(errors.OutputError, OSError)
    assert issubclass(errors.MissingDependencyError, ImportError)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ValidationError("x"), 2),
        (errors.OutputError("x"), 2),
        (errors.PluginError("x"), 2),
        (errors.LiveError("x"), 3),
        (errors.VerificationError("x"), 1),
    ],
)
def test_a_command_ends_with_the_exit_code_of_its_error(
    error: errors.PackerError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hung is not bad input: what was requested could not be done."""

    def fails(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr("packer.cli.cli.main", fails)
    assert run(["live"]) == code


def test_numbers_of_numpy_are_shown_as_numbers() -> None:
    """The type of a number says nothing to a user."""
    assert [errors.shown(value) for value in (np.float64(1.5), np.int64(3), 2, "x")] == ["1.5", "3", "2", "'x'"]


def test_a_file_error_says_where() -> None:
    """File, row, column and key come before the rule."""
    error = errors.FileFormatError("no.", path="f.csv", row=3, column="rate")
    assert str(error) == "f.csv, row 3, column 'rate': no."
    assert str(errors.FileFormatError("no.", path="p.toml", key="gpu.name")) == "p.toml, key 'gpu.name': no."


def test_a_file_error_gets_the_file_that_is_read() -> None:
    """What reads a file names it once; an error of another file in it keeps that one's name, also between processes."""
    with pytest.raises(errors.FileFormatError) as found, errors.reading("cluster.toml"):
        raise errors.FileFormatError("no.", key="nodes")
    assert str(found.value) == "cluster.toml, key 'nodes': no."
    again = pickle.loads(pickle.dumps(found.value))
    assert (str(again), again.path, again.key) == (str(found.value), "cluster.toml", "nodes")
    with pytest.raises(errors.FileFormatError, match=r"^profile\.toml: no"), errors.reading("cluster.toml"):
        raise errors.FileFormatError("no.", path="profile.toml")


def test_an_unknown_name_gets_the_nearest() -> None:
    """A misspelt name is answered with the known ones and the nearest."""
    error = errors.UnknownNameError("solver", "gredy", ["random", "greedy"])
    assert str(error) == "Unknown solver 'gredy'. Did you mean 'greedy'? Known: greedy, random."
    assert "Did you mean" not in str(errors.UnknownNameError("solver", "zzz", ["greedy"]))
    assert str(errors.UnknownNameError("solver", "x", [])).endswith("Known: none.")


def test_an_unknown_name_passes_between_processes() -> None:
    """A worker process can send the error to its parent, which would wait forever for one that it can't read."""
    error = errors.UnknownNameError("solver", "gredy", ["greedy"], "Or none.")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_list_of_known_names_stays_short() -> None:
    """Of thousands of names, such as those of a fleet's adapters, the nearest and the first ones are said."""
    error = errors.UnknownNameError("adapter", "bot-70O", [f"bot-{k}" for k in range(9000)])
    assert "Did you mean 'bot-70" in str(error)
    assert str(error).endswith("and 8,992 more.")
    assert len(error.known) == 9000
    assert str(errors.UnknownNameError("adapter", "a", [])).endswith("Known: none.")


@pytest.mark.parametrize("value", ["x" * 10**6, ["y" * 10**6], 10**300])
def test_shown_values_stay_short(value: object) -> None:
    """However large a value is, the message stays readable."""
    assert len(errors.shown(value)) < 120
