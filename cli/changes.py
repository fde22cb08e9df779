"""Text of what changes on running servers from one plan to another."""

from __future__ import annotations

import packer
from packer.words import counted, listed

RENUMBERED = "exported files name servers by the new numbers; packer live apply goes by the adapters that they hold"


def changes(old: packer.Plan, plan: packer.Plan) -> list[str]:
    """Changes from the running plan `old`: adapters that move; servers that stay, start, stop or start again."""
    from packer.moves import places, rerouted, restarted

    before, now = set(old.workload.names), set(plan.workload.names)
    moved = [plan.workload.names[i] for i in plan.moves.adapters] if plan.moves else []
    numbers = plan.moves.servers if plan.moves else ()
    kept = [number for number in numbers if number is not None]
    lines = [
        f"Changes     {counted(len(moved), 'adapter')} moved, {len(now - before)} new, {len(before - now)} gone; "
        f"servers: {len(kept)} stay, {len(numbers) - len(kept)} start, {len(old.bins) - len(kept)} stop"
    ]
    if moved:
        lines.append(f"Moving      {listed(moved, 10)}")
    if plan.moves and (others := sorted(rerouted(old, plan, plan.moves))):
        lines.append(f"Shares      {counted(len(others), 'adapter')} with other shares by server: {listed(others, 10)}")
    if homeless := sorted(before & now & places(old).keys() - places(plan).keys()):
        lines.append(f"No server   {counted(len(homeless), 'adapter')}: {listed(homeless, 10)}")
    renumbered = [f"{number} → {k}" for k, number in enumerate(numbers) if number not in (None, k)]
    if renumbered:
        lines.append(f"Renumbered  {', '.join(renumbered)}: {RENUMBERED}")
    for k, j in restarted(old, plan.moves, plan.bins) if plan.moves else ():
        slots = [f"{item.max_loras} × {item.max_lora_rank}" for item in (old.bins[j], plan.bins[k])]
        lines.append(f"Restart     server {named(k, j)}: max_loras × rank {' → '.join(slots)}")
    return lines


def named(k: int, was: int | None) -> str:
    """A server's number, with that of the running server which it continues if it differs; None: it is new."""
    return f"{k} (new)" if was is None else str(k) if was == k else f"{k} (was {was})"
