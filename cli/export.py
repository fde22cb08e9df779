"""`packer export`: a plan becomes what starts it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from packer.cli import options
from packer.cli.output import note, print_json
from packer.export.formats import FORMATS

_STARTS = ("vllm", "compose", "k8s", "helm", "aibrix")
"""Formats that name the base model."""


@click.command()
@options.plan_argument
@click.option(
    "--format",
    "format_name",
    type=click.Choice(tuple(FORMATS)),
    default="vllm",
    show_default=True,
    help="What to write: start commands, manifests, chart values, or routing tables.",
)
@click.option(
    "-o",
    "--output",
    default=None,
    metavar="FOLDER|FILE",
    help="Where to write: a folder for every file of the format, or a path that ends as its main file does.  "
    "[default: the main file to standard output]",
)
@click.option(
    "--sources",
    "sources_path",
    default=None,
    metavar="FILE",
    help="Table adapter → path or repository: CSV with the columns adapter,source, or JSON or YAML.",
)
@click.option(
    "--adapters-dir",
    default="/adapters",
    show_default=True,
    metavar="FOLDER",
    help="Where adapters lie on the servers, for those without a source.",
)
@click.option("--model", default=None, metavar="NAME|PATH", help="Base model.  [default: the profile's]")
@click.option(
    "--image",
    default=None,
    metavar="IMAGE",
    help="Container image.  [default: vLLM's, of the profile's version]",
)
@click.option(
    "--prefix", default="gpu", show_default=True, metavar="NAME", help="Start of the servers' names."
)
@click.option("--namespace", default=None, metavar="NAME", help="Kubernetes namespace.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port of a server; on a shared host, of the first one.",
)
@click.option(
    "--address",
    default=None,
    metavar="TEMPLATE",
    help="Where routers find a server, with {name}, {index} and {port}.  [default: {name}:8000]",
)
@click.option(
    "--adapters-claim", default=None, metavar="NAME", help="Kubernetes volume claim with the adapters."
)
@click.option("--token-secret", default=None, metavar="NAME", help="Kubernetes Secret with the key 'token'.")
@options.force_option
@options.json_option
@options.quiet_option
def export(
    plan_path: str,
    format_name: str,
    output: str | None,
    sources_path: str | None,
    adapters_dir: str,
    model: str | None,
    image: str | None,
    prefix: str,
    namespace: str | None,
    port: int,
    address: str | None,
    adapters_claim: str | None,
    token_secret: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write what starts a plan: vLLM commands, Compose, Kubernetes, Helm, AIBrix, routing tables.

    An infeasible plan is not exported (exit code 3). With --json the files are printed as one JSON object.

    \b
    Examples:
      packer export plan.json --format vllm > start.sh
      packer export plan.json --format k8s --sources adapters.csv --adapters-claim adapters -o packer.yaml
      packer export plan.json --format routing --address '127.0.0.1:{port}' -o routing/
    """
    from packer.export.formats import export_plan
    from packer.export.servers import Options
    from packer.export.sources import read_sources
    from packer.io.plans import read_plan

    plan = read_plan(plan_path)
    if plan.unplaced or not plan.bins:
        note(f"the plan is infeasible ({len(plan.unplaced)} adapters without a server): nothing to run")
        return 3
    chosen = Options(
        sources=read_sources(sources_path) if sources_path else {},
        adapters_dir=adapters_dir,
        model=model,
        image=image,
        prefix=prefix,
        namespace=namespace,
        port=port,
        address=address,
        adapters_claim=adapters_claim,
        token_secret=token_secret,
    )
    names = {item.profile.model.name for item in plan.bins}
    if model is None and format_name in _STARTS and any("/" not in name for name in names):
        listed = ", ".join(sorted(names))
        note(f"the profile calls the base model {listed}; --model gives vLLM its repository", quiet=quiet)
    files = export_plan(plan, format_name, chosen)
    if as_json:
        print_json({"format": format_name, "files": files})
    if output is not None:
        for path in _write(files, Path(output), force=force):
            note(f"wrote {path}", quiet=quiet)
    elif not as_json:
        main, *others = files
        click.echo(files[main], nl=False)
        if others:
            note(f"this is {main}; -o FOLDER also writes {', '.join(others)}", quiet=quiet)
    return 0


def _write(files: Mapping[str, str], target: Path, *, force: bool) -> list[Path]:
    """Write one file or a folder of files; nothing at all unless every path can be written."""
    from packer.errors import OutputError
    from packer.io.files import check_writable, write_text

    by_suffix = {Path(name).suffix: text for name, text in reversed(list(files.items()))}
    if not target.is_dir() and target.suffix in by_suffix:
        write_text(target, by_suffix[target.suffix], force=force)
        return [target]
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{target}: the folder can't be made: {error.strerror}.") from None
    paths = {target / name: text for name, text in files.items()}
    for path in paths:
        check_writable(path, force=force)
    for path, text in paths.items():
        write_text(path, text, force=force)
    return list(paths)
