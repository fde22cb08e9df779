"""What adapter slots cost in KV cache, and with how many of them a server still starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from packer.profile import Profile
from packer.twin.memory.policy import kv_cache_tokens, memory_error, memory_policy
from packer.twin.memory.starts import largest_max_loras


@dataclass(frozen=True)
class MemoryTable:
    """KV cache of a profile over `max_loras` and `max_lora_rank`.

    `tokens`: (max_loras, max_lora_rank) → tokens of KV cache; None where the server does not start.
    `errors`: (max_loras, max_lora_rank) → why the server does not start, or None.
    `largest`: max_lora_rank → the largest `max_loras` with which the server starts, at most
    `packer.settings.MAX_LORAS`; 0 if none.
    """

    profile: Profile
    tokens: dict[tuple[int, int], int | None]
    errors: dict[tuple[int, int], str | None]
    largest: dict[int, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        names = ("max_loras", "max_lora_rank", "kv_cache_tokens", "memory_error")
        cells = ((*at, tokens or 0, self.errors[at]) for at, tokens in self.tokens.items())
        rows = [dict(zip(names, row, strict=True)) for row in cells]
        about = {"profile": self.profile.name, "calibrated": self.profile.calibrated}
        return {**about, "rows": rows, "largest_max_loras": self.largest}


def memory_table(profile: Profile, max_loras: Sequence[int], max_lora_rank: Sequence[int]) -> MemoryTable:
    """The KV cache left at each number and rank of slots; the least rank of the version stands for less."""
    ranks = dict.fromkeys(profile.settings(1, rank).max_lora_rank for rank in max_lora_rank)
    grid = [(slots, rank) for slots in max_loras for rank in ranks]
    settings = {point: profile.settings(*point) for point in grid}
    errors = {point: memory_error(profile, settings[point]) for point in grid}
    tokens = {point: None if errors[point] else kv_cache_tokens(profile, settings[point]) for point in grid}
    return MemoryTable(profile, tokens, errors, {rank: largest_max_loras(profile, rank) for rank in ranks})


def slot_cost_tokens(profile: Profile, rank: int) -> float:
    """Tokens of KV cache that one slot of this rank takes; 0 where adapters share the cache's memory."""
    reserved = memory_policy(profile).reserved_bytes(profile, profile.settings(1, rank))
    return reserved / profile.model.kv_bytes_per_token
