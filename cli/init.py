"""`packer init`: from a log or a fleet to a first plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import packer
from packer.cli.declare import argument, bundle, command, option, typed
from packer.cli.options import Writing, common
from packer.cli.output import interruptible
from packer.cli.settings import ServerSettings
from packer.cli.traffic import LogOptions, RankOptions, refuse_unused
from packer.words import counted

if TYPE_CHECKING:
    from packer.operate.view import Observed

CLEARLY_BUSIER = 1.1  # Ratio of planned load to mean load from which the GPUs for the mean load are printed too.
LOG_ONLY = ("ranks", "base", "keys", "skip", "assign")  # Options that say how a log is read.
FILES = ("profile.toml", "fleet.csv", "packer.toml", "plan.json", "report.html")
"""Files of a project, in the order in which they are written."""


@bundle
class ProjectOptions(ServerSettings):
    """Traffic, model, GPU and folder of a new project.

    model: Base model: a Hugging Face repository known to packer, or the model's config.json.
    gpu: h100-80gb, h200, b200, a100-80gb, l40s, l4, rtx4090, mi300x, …, or the data sheet of another.
    folder: Where the project is written.
    """

    traffic_path: str = argument("LOG|WORKLOAD")
    model: str = common("model", required=True)
    gpu: str = common("gpu", required=True)
    folder: str = option("-o", "--output", default=".", metavar="FOLDER")
    at: str = common("at")
    slo: tuple[str, ...] = common("slo")
    seed: int = common("seed")

    def profile(self, rank: int = 0) -> packer.Profile:
        """The profile of the model on the GPU; `rank`: largest rank of the fleet's adapters, 0: not known."""
        from packer.operate.project import profile_for

        return profile_for(self.model, self.gpu, self.engine, rank)


@command
def init(given: ProjectOptions, reading: LogOptions, ranks: RankOptions, out: Writing) -> int:
    """Start a project: profile.toml, fleet.csv, packer.toml, plan.json and report.html in one folder.

    The traffic is a log of requests (JSON lines, CSV or Parquet, also .gz, with time, model and token counts) or a
    workload file (adapter, rank, rate). The profile is the calibrated one of the model and GPU if packer has it, else
    an estimate. packer.toml holds the folder's defaults.

    Exit code 3 means that no plan keeps the latency limits; the other files are written.

    \b
    Examples:
      packer init access.jsonl --rank 16 --model meta-llama/Llama-3.1-8B-Instruct --gpu h100-80gb -o project
      packer init fleet.csv --model config.json --gpu l40s --max-model-len 8192 -o project
    """
    import tomlkit

    from packer.cli.plan_table import plan_json, plan_lines
    from packer.io.files import make_folder, write_text
    from packer.io.plans import write_plan
    from packer.io.profiles import write_profile
    from packer.io.recognise import kind_of
    from packer.io.workloads import write_workload
    from packer.operate.project import fleet_for, is_log
    from packer.operate.view import View
    from packer.report.page import write_report
    from packer.traces.measure import rounded

    assumed = any(typed(LOG_ONLY))
    if not is_log(given.traffic_path, assumed=assumed) and kind_of(given.traffic_path) in ("workload", None):
        refuse_unused("a workload file", (*LOG_ONLY, "at"))
    paths = {name: str(Path(given.folder) / name) for name in FILES}
    out.check(*(path for path in paths.values() if os.path.exists(path)))
    profile = given.profile()
    fields, named, view = reading.fields(), reading.named(given.seed), View(given.at)
    own = filter(None, (given.model, profile.model.name, profile.model.repository))
    known, path = ranks.read(), given.traffic_path
    with out.progress(f"reading {path}"):  # a long log takes a minute
        fleet, seen = fleet_for(path, known, view=view, fields=fields, named=named, base=tuple(own))
    profile = given.profile(int(fleet.ranks.max()))
    slo = fleet.held_to(given.slo).slo
    make_folder(given.folder)
    for text in () if seen is None else seen.notes:
        out.note(text)
    out.note_profiles(profile)
    write_profile(profile, paths["profile.toml"], force=out.force)
    source = f"packer init {Path(given.traffic_path).name}"
    write_workload(rounded(fleet), paths["fleet.csv"], force=out.force, comments=[source])
    said = "# Defaults of packer's commands in this folder: docs/how-to/configure.md.\n"
    lists = {"slo": given.slo, "key": reading.keys, "skip": reading.skip}
    defaults = {"profile": "profile.toml", **{name: list(each) for name, each in lists.items() if each}}
    defaults |= {"strip-prefix": fields.strip_prefix} if fields.strip_prefix else {}
    write_text(paths["packer.toml"], said + tomlkit.dumps(defaults), force=out.force)
    with interruptible() as stop, out.progress() as progress:
        hour = None if seen is None else seen.hour
        plan = packer.recommend(fleet, profile, slo=slo, seed=given.seed, progress=progress, stop=stop, log_hour=hour)
        planned_for = []
        # The line needs a plan for the mean load, which is made only if the line is printed.
        if seen is not None and not (out.as_json or out.quiet):
            planned_for.append(_planned_for(seen, profile, slo, given.seed, stop))
        if plan.status is not packer.Status.INFEASIBLE:
            write_plan(plan, paths["plan.json"], force=out.force)
            write_report(plan, paths["report.html"], curves=3, force=out.force, progress=progress)
    out.result(lambda: plan_json(plan), lambda: [*planned_for, *plan_lines(plan, briefly=True)])
    if plan.status is packer.Status.INFEASIBLE:
        return 130 if plan.interrupted else 3
    for path in paths.values():
        out.note(f"wrote {path}")
    out.note(f"next, in {given.folder}: packer export plan.json --format vllm, or another of its formats")
    return 130 if plan.interrupted else 0


def _planned_for(seen: Observed, profile: packer.Profile, slo: packer.Slo, seed: int, stop: Callable[[], bool]) -> str:
    """Say which hour of the log the plan is for, and how many GPUs the mean load needs."""
    from packer.objectives.headroom import with_rates

    text = f"Log of {seen.span}; planned for {seen.planned_for}"
    if seen.times_mean < CLEARLY_BUSIER or stop():
        return f"{text}."
    mean = with_rates(seen.fleet, seen.loads["mean"])
    plan = packer.recommend(mean, profile, slo=slo, seed=seed, verify=False, stop=stop)
    return f"{text}; at steady mean rates: {counted(plan.n_gpus, 'GPU')}."
