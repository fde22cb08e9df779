"""Profiles by name and as TOML files, whose tables correspond to the dataclasses of `packer.profile`."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import cache
from typing import Any

from packer.errors import FileFormatError, path_of, reader, reading
from packer.io.documents import parse_toml, toml_table
from packer.io.files import read_text, write_text
from packer.io.schema import check_version, parse
from packer.io.shipped import read_named, shipped
from packer.profile import Profile

FOLDER = "packer.twin.profiles"
SCHEMA = 1  # Version of the file format.


def profile_names() -> tuple[str, ...]:
    """Names of the shipped profiles, "<gpu>/<model>", sorted."""
    return tuple(shipped(FOLDER))


def load_profile(name_or_path: str | os.PathLike[str]) -> Profile:
    """A shipped profile by its name, or the profile in a `.toml` file.

    Raises `UnknownNameError`: no shipped profile has that name; `FileFormatError`: the file can't be read, or a value
    in it breaks a rule; names the key.
    """
    text = path_of(name_or_path, "the name of a profile")
    return _read_profile(text) if text.endswith(".toml") or os.path.isfile(text) else _load_shipped(text)


@reader
def _read_profile(path: str) -> Profile:
    if not path.endswith(".toml"):
        raise FileFormatError("expected a profile's name to end in .toml.")
    return parse_profile(read_text(path))


@cache
def _load_shipped(name: str) -> Profile:
    with reading(f"{name}.toml"):
        return parse_profile(read_named("profile", name, FOLDER)[1])


def parse_profile(text: str) -> Profile:
    """The profile in a TOML text."""
    return profile_from_dict(parse_toml(text))


def profile_from_dict(data: Any) -> Profile:
    """The profile in nested dicts, as a plan file embeds it."""
    return parse(Profile, check_version(data, SCHEMA))


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Nested dicts in the shape of the file; keys without a value are left out."""
    return {"schema": SCHEMA, **toml_table(asdict(profile))}


def write_profile(profile: Profile, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write a profile as TOML, atomically; an existing file needs `force`."""
    write_text(path, format_profile(profile), force=force)


def format_profile(profile: Profile) -> str:
    """A profile as the text of its TOML file; `parse_profile` gives the same profile back."""
    import tomlkit

    data = profile_to_dict(profile)
    document = tomlkit.document()
    if not profile.calibrated:
        document.add(tomlkit.comment("Estimated from datasheets, not calibrated on a server."))
    measured = tomlkit.array().multiline(multiline=bool(data["memory"]["measured"]))
    for point in data["memory"]["measured"]:
        measured.append(point)
    data["memory"]["measured"] = measured
    for key, value in data.items():
        if value != {} or key == "latency":
            document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document)
