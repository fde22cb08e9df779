"""Trained predictors that come with packer."""

from __future__ import annotations

from importlib.resources import files

from packer.errors import ModelError
from packer.predictors.store import Model, from_bytes
from packer.profile import Profile

PACKAGE = "packer.predictors.models"
KINDS = ("forest", "boosting", "tree")
"""Kinds that are shipped; "svm" and "knn" can be trained."""


def file_name(kind: str, profile_name: str) -> str:
    """File of the shipped predictor of a kind for a profile."""
    return f"{profile_name.replace('/', '--')}.{kind}.packer"


def shipped_model(kind: str, profile: Profile) -> tuple[Model, str]:
    """The shipped predictor of a kind for a profile, and the name of its file.

    Raises `ModelError`: there is none, or it was trained for another state of the profile.
    """
    name = file_name(kind, profile.name)
    if name not in {each.name for each in files(PACKAGE).iterdir()}:  # a name may be too long for a file
        raise ModelError(
            f"There is no trained {kind!r} predictor for the profile {profile.name}: train one with "
            f"packer predictor build --profile … and packer predictor train --kind {kind}, or use --predictor twin."
        )
    model = from_bytes(files(PACKAGE).joinpath(name).read_bytes(), name)
    model.check_profile(profile, name)
    return model, name
