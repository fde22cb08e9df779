"""`packer export`: write the files that start a plan's servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from packer.cli.declare import Readers, bundle, command, option, pairs
from packer.cli.options import PlanArgument, Writing
from packer.cli.output import check_distinct, note, print_json
from packer.cli.plan_table import unstarted
from packer.cli.streams import results
from packer.cli.traffic import refuse_unused
from packer.errors import IncompatibleError
from packer.export.formats import FORMATS, Format, export_plan, output_paths
from packer.io.files import write_all
from packer.plan import Plan, Status
from packer.words import counted, listed, plural

if TYPE_CHECKING:
    from packer.export.servers import Options


SETTINGS: Readers = {
    **dict.fromkeys(("adapters-dir", "image", "prefix", "address"), str),
    "port": click.IntRange(1, 65_535),
    **dict.fromkeys(("namespace", "adapters-claim", "token-secret", "stack-version"), str),
}


@bundle
class Exported:
    """What is written, where, and settings that depend on the machines and are not in a plan.

    format_name: What to write: start commands, manifests, chart values, routing tables, or a dashboard.
    output: A folder for every file of the format, or the path of one of them. [default: the main file to standard
        output]
    sources_path: Table adapter → path, Hugging Face repository or, for aibrix and helm, address: CSV with the
        columns adapter,source, or JSON or YAML.
    model: Base model. [default: the repository in the profile]
    settings: A name or place: adapters-dir (of adapters without a source, /adapters), image (of the containers), prefix
        (of the servers' names, gpu), port (of the first server, 8000), address (where routers find a server,
        {name}:8000), namespace, adapters-claim (volume claim with the adapters), token-secret (Secret with the key
        'token'), stack-version. --port 9000 is the same; repeatable.
    node_labels: Label of the nodes, or of those with one kind of GPU; repeatable. [default: with several kinds of GPU
        their product label]
    """

    format_name: str = option("--format", type=click.Choice(tuple(FORMATS)), default="vllm")
    output: str | None = option("-o", "--output", metavar="FOLDER|FILE")
    sources_path: str | None = option("--sources", metavar="FILE")
    model: str | None = option(metavar="NAME|PATH")
    settings: dict[str, Any] = pairs("--set", names=SETTINGS)
    node_labels: tuple[str, ...] = option("--node-label", multiple=True, metavar="[GPU:]KEY=VALUE")

    def options(self) -> Options:
        """The options, for `packer.export.formats.export_plan`."""
        from packer.export.nodes import parse_labels
        from packer.export.servers import Options
        from packer.export.sources import read_sources

        sources = read_sources(self.sources_path) if self.sources_path else {}
        labels = parse_labels(self.node_labels)
        given = {name: value for name, value in self.settings.items() if name != "stack_version"}
        return Options(sources=sources, node_labels=labels, model=self.model, **given)


@command
def export(file: PlanArgument, target: Exported, out: Writing) -> int:
    """Write what starts a plan: vLLM and SGLang commands, Compose, Kubernetes and its stacks, routing tables.

    Stacks: the vLLM production stack (helm), AIBrix, llm-d, KServe, Ray Serve LLM, NVIDIA Dynamo; each format
    names the versions that it fits in docs/how-to/export.md. grafana is a dashboard of predicted and measured figures.

    A plan with adapters that have no server, or with servers that do not start, is not exported (exit code 3); of one
    that breaks its goal that is said.
    With --json the files are printed as one JSON object.
    vLLM loads adapters from paths and Hugging Face repositories; some stacks from buckets too.

    \b
    Examples:
      packer export plan.json --format vllm > start.sh
      packer export plan.json --format k8s --sources adapters.csv --adapters-claim adapters -o packer.yaml
      packer export plan.json --format routing --address '127.0.0.1:{port}' -o routing/
    """
    plan = file.plan()
    if plan.unplaced or not plan.bins:
        without = counted(len(plan.unplaced), "adapter")
        note(f"the plan is infeasible ({without} without a server): nothing to run")
        return 3
    if dead := unstarted(plan, range(len(plan.bins))):
        note(dead)
        return 3
    refuse_unused(f"--format {target.format_name}", _unused(FORMATS[target.format_name]))
    version = target.settings.get("stack_version")
    files = export_plan(plan, target.format_name, target.options(), stack_version=version)
    empty = {FORMATS[target.format_name].loads} - {"", *files}
    paths = {} if target.output is None else output_paths([*files, *empty], target.output, force=out.force)
    if paths and not files.keys() & set(paths.values()):
        raise IncompatibleError(f"The plan has no adapters to load, so {target.format_name} has no {min(empty)}.")
    for path in paths:
        check_distinct(path)
    _say(plan, target, out)
    stale = [Path(target.output or "", name) for name in empty & {*paths.values()}]  # a link, not the file it leads to
    paths = {path: name for path, name in paths.items() if name in files}
    write_all({str(path): files[name] for path, name in paths.items()}, force=out.force)
    for path in paths:
        out.note(f"wrote {path}")
    for path in (each for each in stale if each.exists()):
        path.unlink()
        out.note(f"removed {path}: the plan has no adapters to load")
    if out.as_json:
        print_json({"format": target.format_name, "files": files})
    elif target.output is None:
        click.echo(next(iter(files.values())), nl=False, file=results())
    given = list(paths.values()) or list(files)[:1]
    others = [name for name in files if name not in given]
    if others and (target.output is not None or not out.as_json):
        out.note(f"this is {given[0]}; -o FOLDER also writes {', '.join(others)}")
    return 0


def _say(plan: Plan, target: Exported, out: Writing) -> None:
    """Say what of the plan the files can't hold, or only in another way."""
    kind = FORMATS[target.format_name]
    out.note_profiles(*(item.profile for item in plan.bins))
    if plan.status is Status.INFEASIBLE:
        said = plan.decision or "\n".join(plan.reasons) or "it breaks its goal"
        out.note(f"the plan is infeasible: {said.splitlines()[0].rstrip('.')}")
    shares = [pair for each in plan.bins for pair in zip(each.adapters, each.shares, strict=True)]
    split = {i for i, share in shares if share < 1}
    if split and kind.by_load:
        text = f"{target.format_name} splits the {counted(len(split), 'adapter')} on several servers by load,"
        out.note(f"{text} not by the planned shares: packer evaluate PLAN --router most-idle simulates that")
    gpus = list(dict.fromkeys(each.profile.gpu.name for each in plan.bins))
    if kind.where.startswith("hosts:") and len(gpus) > 1:
        text = f"{target.format_name} numbers GPUs in the order of the servers, whatever their kind"
        out.note(f"{text} ({', '.join(gpus)}): start each server on a host of its kind")
    if kind.own_vllm and "image" not in target.settings:
        planned = ", ".join(sorted({each.profile.engine.version for each in plan.bins}))
        out.note(f"{target.format_name} starts the vLLM of its own image; the plan is for {planned}")
    plain = {k for k, each in enumerate(plan.bins) if not plan.workload.ranks[list(each.adapters)].all()}
    models = {plan.bins[k].profile.model for k in plain}
    if kind.by_load and len(plain) < sum(each.profile.model in models for each in plan.bins):
        where = f"{plural(len(plain), 'server')} {listed(sorted(plain))}"
        out.note(f"{target.format_name} sends requests to the base model to all of its servers; planned: {where}")
    if target.model is None and kind.engine is not None:
        names = sorted({item.profile.model.repository or item.profile.model.name for item in plan.bins})
        if any("/" not in name for name in names):
            called = ", ".join(names)
            out.note(f"the profile calls the base model {called}; --model gives vLLM its repository")


def _unused(kind: Format) -> list[str]:
    """The options that the files of a format do not depend on."""
    unused = [] if kind.pods else ["adapters_claim", "token_secret", "node_labels"]
    unused += [] if kind.pods or kind is FORMATS["gateway-api"] else ["namespace"]
    unused += [] if kind.image else ["image"]
    unused += ["port"] if kind.own_ports else []
    unused += [] if kind.engine else ["sources_path", "model", "adapters_dir"]
    return unused + (["address"] if kind.engine or kind.fits else [])  # other formats are routing tables
