"""One server, on one GPU or a tensor-parallel group: its adapters, its settings and its share of their load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.errors import ValidationError
from packer.memo import Memo
from packer.profile import Profile
from packer.public import checked
from packer.settings import Settings
from packer.workload import Workload

indices = Memo[tuple[int, ...], IntArray](lambda adapters: np.array(adapters, dtype=np.int64), kept=256)
"""A set of adapters as an array, int64 (n,), memoised because searches try the same set with several `max_loras`."""

whole = lru_cache(maxsize=64)(lambda n: (1.0,) * n)  # Shares of n adapters that send all of their requests to one bin.


@dataclass(frozen=True, slots=True)
class Bin:
    """A set of adapters on one server.

    `adapters`: indices into the workload, unique.
    `settings`: from `profile.settings(max_loras, max_lora_rank)`.
    `shares`: share of each adapter's rate that this server gets, in ]0, 1]; by default all are 1 (no replicas).
    """

    adapters: tuple[int, ...]
    settings: Settings
    profile: Profile
    shares: tuple[float, ...] = ()

    @checked
    def __post_init__(self) -> None:
        checks.keep_tuple(self, "adapters", "shares")
        if not self.adapters or len(set(self.adapters)) != len(self.adapters) or min(self.adapters) < 0:
            raise ValidationError("Expected a bin to hold at least one adapter, each once.")
        checks.instance("a server", self.profile, Profile, "packer.load_profile(NAME)")
        checks.instance("the settings of a server", self.settings, Settings, "profile.settings(8, 16)")
        if not self.shares:
            object.__setattr__(self, "shares", whole(len(self.adapters)))
        elif self.is_split:
            if len(self.shares) != len(self.adapters):
                raise ValidationError("Expected one share for each adapter of the bin.")
            shares = (checks.real("a share", share, low=0.0, high=1.0, open_low=True) for share in self.shares)
            object.__setattr__(self, "shares", tuple(shares))

    def with_slots(self, max_loras: int) -> Bin:
        """The same server with another number of slots; its adapters are not checked again."""
        settings = self.profile.settings(max_loras, self.max_lora_rank)
        return Bin.unchecked(self.adapters, settings, self.profile, self.shares)

    @classmethod
    def unchecked(
        cls, adapters: tuple[int, ...], settings: Settings, profile: Profile, shares: tuple[float, ...]
    ) -> Bin:
        """A bin without checks: searches make thousands of bins, and plans are checked at the end."""
        made, write = object.__new__(cls), object.__setattr__
        write(made, "adapters", adapters)
        write(made, "settings", settings)
        write(made, "profile", profile)
        write(made, "shares", shares)
        return made

    @property
    def max_loras(self) -> int:
        """Largest number of adapters on the GPU at once."""
        return self.settings.max_loras

    @property
    def max_lora_rank(self) -> int:
        """Largest rank that the server takes; the rank of every slot."""
        return self.settings.max_lora_rank

    @property
    def gpus(self) -> int:
        """Number of GPUs that the server uses."""
        return self.profile.engine.gpus

    @property
    def is_split(self) -> bool:
        """True if some adapter has a share below 1."""
        return self.shares is not (every := whole(len(self.adapters))) and self.shares != every

    def workload(self, fleet: Workload) -> Workload:
        """The part of the fleet's traffic that this server gets."""
        all_ = len(self.adapters) == len(fleet) and self.adapters == tuple(range(len(fleet)))
        return fleet if all_ and not self.is_split else fleet.subset(self.adapters, self.shares)

    def rates(self, fleet: Workload) -> FloatArray:
        """Rate of each adapter on this server, float64 (n,), req/s."""
        rates = fleet.rates[indices(self.adapters)]
        return rates * np.array(self.shares) if self.is_split else rates

    def offered_tok_s(self, fleet: Workload) -> float:
        """Offered load of this server, tok/s."""
        # NumPy's sums are the same on every processor; those of BLAS are not, and servers are sorted by their load.
        return float((self.rates(fleet) * fleet.mean_tokens[indices(self.adapters)]).sum())

    def requests_s(self, fleet: Workload) -> float:
        """Rate of the requests that this server gets, req/s."""
        return float(self.rates(fleet).sum())

    def gaps_s(self, fleet: Workload) -> float:
        """Offered gaps between output tokens, 1/s: the weight of this server's mean ITL in means over servers."""
        outputs = fleet.mean_output_tokens[indices(self.adapters)]
        return float((self.rates(fleet) * np.maximum(outputs - 1.0, 0.0)).sum())

    def under(self, numbers: Sequence[int] | Mapping[int, int]) -> Bin:
        """The bin with adapter indices replaced: `numbers[i]` for i."""
        return replace(self, adapters=tuple(numbers[i] for i in self.adapters))

    def renumbered(self, number: Mapping[int, int]) -> Bin | None:
        """The bin with adapter indices replaced; adapters without a new index are dropped. None if none is left."""
        placed = zip(self.adapters, self.shares, strict=True)
        left = {number[i]: share for i, share in placed if i in number}
        return replace(self, adapters=tuple(left), shares=tuple(left.values())) if left else None
