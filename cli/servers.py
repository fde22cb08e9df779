"""What every command says of the servers that it judges: their profiles, and which of them are estimates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from packer.cli.output import note_estimated

if TYPE_CHECKING:
    from packer.bin import Bin


def note_estimates(bins: Iterable[Bin], *, quiet: bool) -> None:
    """Say once of each profile that is an estimate that it is one."""
    for profile in dict.fromkeys(item.profile for item in bins):
        note_estimated(profile, quiet=quiet)


def servers(bins: Iterable[Bin]) -> str:
    """The profiles for people, each once: "toy (estimated, not calibrated)"."""
    return ", ".join(sorted({item.profile.label for item in bins}))


def calibrated(bins: Iterable[Bin]) -> bool:
    """Whether no profile is an estimate."""
    return all(item.profile.calibrated for item in bins)
