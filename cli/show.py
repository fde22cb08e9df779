"""`packer show`: a plan again, one of its adapters, or what changes to another plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import packer
from packer.cli.changes import changes, named
from packer.cli.declare import bundle, command, option
from packer.cli.options import Output, PlanArgument
from packer.cli.output import Table
from packer.cli.plan_table import adapter_rows, adapters_table, plan_json, plan_lines
from packer.errors import IncompatibleError
from packer.moves import places, rerouted, restarted

MOST_MOVES = 20  # Largest number of moving adapters in the table.


@bundle
class Shown:
    """What is shown.

    adapters: Where this adapter is and what it gets, instead of the whole plan; repeatable.
    other_path: What changes from PLAN to the plan OTHER: servers that go on, start and stop, adapters that move.
    """

    adapters: tuple[str, ...] = option("--adapter", multiple=True, metavar="NAME")
    other_path: str | None = option("--diff", metavar="OTHER")


@command
def show(file: PlanArgument, shown: Shown, out: Output) -> None:
    """Show a plan again: its decision, servers and figures, an adapter of it, or what changes to another plan.

    \b
    Examples:
      packer show plan.json
      packer show plan.json --adapter billing --adapter chat
      packer show plan.json --diff next.json
    """
    plan = file.plan()
    if shown.adapters and shown.other_path is not None:
        raise IncompatibleError("--adapter shows adapters of one plan, --diff what changes between two: give one.")
    if shown.adapters:
        rows = adapter_rows(plan, shown.adapters)
        out.result({"adapters": rows}, lambda: [adapters_table(plan, shown.adapters), f"Goal: {plan.goal}."])
        return
    if shown.other_path is None:
        out.result(lambda: plan_json(plan), lambda: plan_lines(plan))
        return
    data = _difference(plan, packer.load_plan(shown.other_path))
    out.result(data[0], lambda: data[1])


def _difference(old: packer.Plan, new: packer.Plan) -> tuple[dict[str, Any], list[Table | str]]:
    """Changes from `old` to `new`, as JSON data and as text."""
    from packer.operate.changes import between

    moves = between(old, new)
    names, before = new.workload.names, set(old.workload.names)
    was, now = places(old), places(new)
    moved: list[dict[str, Any]] = [
        {"adapter": name, "from": list(was[name]), "to": list(now[name])} for name in (names[i] for i in moves.adapters)
    ]

    def slots(item: packer.Bin) -> list[int]:
        return [item.max_loras, item.max_lora_rank]

    again = [
        {"server": k, "continues": j, "was": slots(old.bins[j]), "is": slots(new.bins[k])}
        for k, j in restarted(old, moves, new.bins)
    ]
    data: dict[str, Any] = {"gpus": [old.n_gpus, new.n_gpus], "continues": list(moves.servers), "moved": moved}
    data |= {"new": sorted(set(names) - before), "gone": sorted(before - set(names))}
    data["shares"] = [
        {"adapter": name, "from": was[name], "to": now[name]} for name in sorted(rerouted(old, new, moves))
    ]
    data["without_server"] = sorted(before & set(names) & was.keys() - now.keys())
    data |= {"restarted": again, "goals": [old.goal, new.goal]}
    lines: list[Table | str] = [
        f"GPUs        {old.n_gpus} → {new.n_gpus}",
        f"Made for    {old.goal}" + (f" → {new.goal}" if new.goal != old.goal else ""),
        *changes(old, replace(new, moves=moves)),
    ]
    if moved:
        shown = [
            ([each["adapter"]], each["from"], [named(k, moves.servers[k]) for k in each["to"]])
            for each in moved[:MOST_MOVES]
        ]
        rows = [[", ".join(map(str, cell)) or "none" for cell in row] for row in shown]
        columns = ("adapter", "from old server", "to new server")
        first = f", the first {MOST_MOVES} of {len(moved):,}" if len(moved) > MOST_MOVES else ""
        lines.append(Table(f"Adapters that move{first}", columns, rows, left=(0, 1, 2)))
    return data, lines
