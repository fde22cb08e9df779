"""MaxBase: fill each GPU up to what it serves without adapters (a baseline of arXiv 2602.24044)."""

from __future__ import annotations

from packer.solvers.backbone import backbone_tok_s
from packer.solvers.base import Problem, Solution
from packer.solvers.order import paper_order
from packer.solvers.reasons import out_of_gpus
from packer.solvers.slots import SlotSearch
from packer.solvers.support import chooses_gpus, one_type


class MaxBase:
    """Next fit by offered load alone, with a slot for each adapter. Ignores starvation and memory."""

    name = "maxbase"
    slots_per_adapter = 1.0

    def supports(self, problem: Problem) -> str | None:
        """Why the solver can't run: the objective must choose the number of GPUs, and there must be one GPU type."""
        return chooses_gpus(problem) or one_type(problem)

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        capacity = backbone_tok_s(problem.workload, problem.profile)
        loads = problem.workload.offered_tok_s_by_adapter
        parts: list[list[int]] = []
        room = 0.0
        for i in paper_order(problem.workload).tolist():
            if not parts or loads[i] > room:
                parts.append([])
                room = capacity
            parts[-1].append(i)
            room -= float(loads[i])
        limit = problem.max_gpus if problem.max_gpus is not None else len(parts)
        slots = SlotSearch(problem)
        share = self.slots_per_adapter
        bins = tuple(slots.make(part, max(1, round(len(part) * share))) for part in parts[:limit])
        left = tuple(i for part in parts[limit:] for i in part)
        reasons = out_of_gpus(problem, left, len(parts)) if left else ()
        return Solution(bins, left, reasons, details={"backbone_tok_s": capacity})


class MaxBaseHalf(MaxBase):
    """MaxBase with a slot for every second adapter."""

    name = "maxbase-half"
    slots_per_adapter = 0.5
