"""The versions of a stack that a format was checked against."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packer.errors import IncompatibleError, ValidationError, shown

_VERSION = re.compile(r"v?\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Versions:
    """From the first to the last; `last` None: and later."""

    stack: str
    first: str
    last: str | None

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.stack} {self.first} and later"
        return f"{self.stack} {self.first}" + ("" if self.last == self.first else f" to {self.last}")

    def check(self, version: str) -> None:
        """Check the version that somebody runs; a patch release, as 0.7.3, counts as its minor one, 0.7.

        Raises `ValidationError`: it is no version; `IncompatibleError`: it is not one of these.
        """
        if not _VERSION.fullmatch(version):
            raise ValidationError(
                f"Expected a version of {self.stack} as {self.first}, got {shown(version)}."
            )
        given, first = _parts(version), _parts(self.first)
        fits = given[: len(first)] >= first
        if self.last is not None:
            last = _parts(self.last)
            fits = fits and given[: len(last)] <= last
        if not fits:
            raise IncompatibleError(
                f"Expected {self}, which this format was checked against, got {self.stack} {version}."
            )


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("v").split("."))
