"""The picture of what slots cost: KV cache over the number of slots."""

from __future__ import annotations

from collections.abc import Mapping

from packer.profile import Profile
from packer.report.figures import Figure, Line, Mark, Panel
from packer.twin.memory.policy import kv_cache_tokens

MOST_SLOTS = 1024
"""Curves end here."""


def memory_figure(profile: Profile, largest: Mapping[int, int]) -> Figure:
    """KV tokens over the number of slots, a curve for each slot rank, to where the server no longer starts.

    `largest`: slot rank → the largest number of slots with which the server starts.
    """
    end = min(MOST_SLOTS, max(1, *largest.values()))
    series = []
    for rank, most in largest.items():
        last = min(end, most)
        slots = sorted({1 + round(k * (last - 1) / 96) for k in range(97)}) if last else []
        tokens = [kv_cache_tokens(profile, profile.settings(n, rank)) for n in slots]
        series.append(Line(slots, tokens, f"slot rank {rank}"))
    panel = Panel(
        series,
        title=profile.label,
        x_label="max_loras",
        y_label="KV cache, tokens",
        marks=(Mark(profile.memory.min_kv_tokens, "least to start", axis="y"),),
    )
    return Figure([panel], title="What adapter slots cost", columns=1, panel_size=(8.0, 4.5))
