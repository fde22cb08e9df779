"""Kinds of server on the command line: profiles, or GPUs and a model, with prices and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

import packer
from packer.cli.declare import bundle, option, pairs, shared_help, typed
from packer.cli.options import DEFAULT_PROFILE, common
from packer.cli.settings import CHOSEN, NO_LAW, OF_LOGS, SERVER_SETTINGS, ServerSettings
from packer.cli.traffic import refuse_unused


@bundle
class KindArguments(ServerSettings):
    """The kinds of server to plan with.

    gpu_names: Plan with servers of this GPU and --model: h200, a100-80gb, l40s, rtx4090, …; repeatable.
    model: The base model: a Hugging Face repository, or its config.json.
    prices: Price of a server per hour, US dollars; with --gpu of one GPU; for one kind a number alone; repeatable.
        [default: the profile's]
    available: GPUs at hand of the kind that the profile runs on; for one kind a number alone; repeatable. [default: any
        number]
    """

    settings: dict[str, tuple[Any, ...]] = pairs(
        "--set", names=SERVER_SETTINGS, refused=NO_LAW | CHOSEN | OF_LOGS, help=shared_help()["set-of-gpu"]
    )
    gpu_names: tuple[str, ...] = common("gpu", multiple=True)
    model: str | None = common("model")
    profile_names: tuple[str, ...] = common(
        "profile",
        multiple=True,
        help=f"The server: a shipped profile or a profile file; repeatable.  [default: {DEFAULT_PROFILE}]",
    )
    prices: tuple[str, ...] = option("--price", multiple=True, metavar="PROFILE=PRICE")
    available: tuple[str, ...] = option("--available", multiple=True, metavar="PROFILE=N")

    def kinds(self, rank: int = 0) -> list[packer.GpuKind]:
        """The kinds of server, with the prices and numbers of GPUs that were given. `rank`: largest rank of the fleet's
        adapters, for servers given by their GPU; 0: not known."""
        by_gpu = bool(self.gpu_names) or self.model is not None
        if any(typed(["profile_names"])) and not any(typed(["gpu_names", "model"])):
            by_gpu = False  # the configuration's, which the command line overrides
        names = self.gpu_names if by_gpu else self.profile_names or (DEFAULT_PROFILE,)
        found = self._of_gpus(rank) if by_gpu else self._of_profiles(names)
        prices = _by_profile("--price", "PRICE", self.prices, names)
        counts = _by_profile("--available", "N", self.available, names)
        kinds = []
        for name, profile in found:
            price = prices[name] * (profile.engine.gpus if by_gpu else 1) if name in prices else None
            kinds.append(packer.GpuKind(profile, price, int(counts[name]) if name in counts else None))
        return kinds

    def _of_profiles(self, names: Sequence[str]) -> list[tuple[str, packer.Profile]]:
        """Name and profile, once for every combination of the given settings."""
        from packer.twin.override import variants

        if alone := {"tensor_parallel_size", "data_parallel_size", "quantization"} & set(self.settings):
            raise click.UsageError(f"--{min(alone).replace('_', '-')} goes with --gpu and --model.")
        return [(name, each) for name in names for each in variants(packer.load_profile(name), **self.settings)]

    def _of_gpus(self, rank: int) -> list[tuple[str, packer.Profile]]:
        """As `_of_profiles`, by GPU and model: calibrated profiles if packer has them, otherwise estimates."""
        from packer.operate.project import profiles_for
        from packer.twin.override import variants

        refuse_unused("--gpu and --model", ("profile_names",))
        if not self.gpu_names or self.model is None:
            raise click.UsageError(f"Missing option '--{'model' if self.gpu_names else 'gpu'}'.")
        groups = ("tensor_parallel_size", "data_parallel_size")
        sizes = {name: self.settings[name] for name in groups if name in self.settings}
        others = {name: values for name, values in self.settings.items() if name not in groups}
        own = {name: values[0] for name, values in others.items() if len(values) == 1}
        several = {name: values for name, values in others.items() if len(values) > 1}
        return [
            (gpu, each)
            for gpu in dict.fromkeys(self.gpu_names)
            for profile in profiles_for(self.model, gpu, sizes, own, rank)
            for each in variants(profile, **several)
        ]


def _by_profile(name: str, what: str, given: Sequence[str], profiles: Sequence[str]) -> dict[str, float]:
    """Parse PROFILE=NUMBER; numbers of GPUs must be whole. If there is one profile, NUMBER alone is enough."""
    found = {}
    for item in given:
        profile, said, text = item.rpartition("=")
        if not said and len(profiles) == 1:
            profile = profiles[0]
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if profile not in profiles or not (0.0 <= value < 1e9 and (what == "PRICE" or value.is_integer())):
            number = "a price" if what == "PRICE" else "a whole number"
            rule = f"{name}: expected PROFILE={what} with one of {', '.join(profiles)} and {number} >= 0,"
            raise click.UsageError(f"{rule} got {item[:80]!r}.")
        if profile in found:
            raise click.UsageError(f"{name}: expected each profile once, got {profile} twice.")
        found[profile] = value
    return found
