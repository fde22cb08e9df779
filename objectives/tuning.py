"""Train as much as possible during inference, on a given number of GPUs and within latency limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packer.bin import Bin
from packer.errors import IncompatibleError
from packer.evaluation import Evaluations
from packer.job import FineTuning
from packer.objectives.base import Objective
from packer.profile import Profile
from packer.twin.tuning.policy import trains
from packer.workload import Workload


@dataclass(frozen=True)
class MostTuning(Objective):
    """Maximise the tokens on which the GPUs train per second, while each keeps the goal.

    `policy`: how training shares a server; "": the policy of the workload's job, or "llmstation" without a job.
    """

    policy: str = ""

    name = "tuning"
    minimises = "negative training tok/s"
    fixed_gpus = True
    balances = False

    def supports(self, profiles: Sequence[Profile]) -> str | None:
        """Training is charged by the linear step law."""
        paper = [profile.name for profile in profiles if profile.latency.form != "linear"]
        return f"it needs a linear step law, which {', '.join(paper)} has not" if paper else None

    def fleet(self, workload: Workload) -> Workload:
        """The fleet with a fine-tuning job on every server: the workload's job, or a default one. Raises
        `IncompatibleError`: the job has no samples, or its policy is "none"."""
        fleet = super().fleet(workload)
        fleet = fleet.tuned_by(self.policy or (workload.fine_tuning or FineTuning()).policy)
        if not trains(fleet.fine_tuning):
            raise IncompatibleError("The objective 'tuning' needs a job with samples, and a policy other than 'none'.")
        return fleet

    def key(self, workload: Workload, bins: Sequence[Bin], evaluations: Evaluations) -> tuple[float, ...]:
        """(minus the training tokens per second of all GPUs,)."""
        return (-float(evaluations.tuning_tok_s.sum()),) if bins else ()
