"""Predictors by name or path."""

from __future__ import annotations

import os
from pathlib import Path

from packer import registry
from packer.predictors.base import Predictor
from packer.profile import Profile


def load_predictor(name: str | os.PathLike[str], profile: Profile, *, seed: int = 0) -> Predictor:
    """The judge of that name ("twin", "forest", …), or the trained one in a file, for this profile.

    Parameters
    ----------
    name
        A registered predictor, or the path of a file written by `packer train` (it ends in `.packer`, or
        contains a directory).
    profile
        The server that will be judged; a trained predictor for another one is refused.
    seed
        Of whatever the predictor draws at random.

    Raises
    ------
    UnknownNameError
        No predictor has that name.
    FileFormatError
        There is no such file.
    ModelError
        The file is damaged, or belongs to another profile.
    """
    text = os.fspath(name)
    if is_path(text):
        from packer.predictors.learned import LearnedPredictor

        return LearnedPredictor.read(Path(text), profile)
    kind = registry.load("predictor", text)
    has_factory = hasattr(kind, "for_profile")
    predictor: Predictor = kind.for_profile(profile, seed=seed) if has_factory else kind()
    return predictor


def is_path(name: str) -> bool:
    """Whether a text names a file rather than a registered predictor."""
    return name.endswith(".packer") or "/" in name or os.sep in name
