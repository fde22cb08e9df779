"""`packer export`: a plan becomes what starts it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from packer.cli import options
from packer.cli.output import note, note_estimated, print_json
from packer.export.formats import FORMATS

if TYPE_CHECKING:
    from packer.plan import Plan

_STARTS = ("vllm", "compose", "k8s", "helm", "aibrix")
"""Formats that name the base model."""
_SAME = {".yml": ".yaml"}
_FILE_SUFFIX = re.compile(r"\.[a-z][a-z0-9]{1,5}")
"""Endings that people give to files; `.d` or `.2` may well end the name of a folder."""


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
    help="Where to write: a folder for every file of the format, or a path that ends as one of them does.  "
    "[default: the main file to standard output]",
)
@click.option(
    "--sources",
    "sources_path",
    default=None,
    metavar="FILE",
    help="Table adapter → path, Hugging Face repository or, for aibrix and helm, address: CSV with the columns "
    "adapter,source, or JSON or YAML.",
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
    "--prefix",
    default="gpu",
    show_default=True,
    metavar="NAME",
    help="Start of the servers' names; its own start is a letter.",
)
@click.option("--namespace", default=None, metavar="NAME", help="Kubernetes namespace.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8000,
    show_default=True,
    help="Port of a server; on a shared host, of the first one, and the others' follow.",
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
    vLLM loads adapters from paths and Hugging Face repositories; AIBrix and the production stack from buckets
    too.

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
        count = len(plan.unplaced)
        without = f"{count} adapter{'' if count == 1 else 's'} without a server"
        note(f"the plan is infeasible ({without}): nothing to run")
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
    files = export_plan(plan, format_name, chosen)
    paths = {} if output is None else output_paths(list(files), output, force=force)
    for profile in dict.fromkeys(item.profile for item in plan.bins):
        note_estimated(profile, quiet=quiet)
    if model is None and format_name in _STARTS:
        _note_model(plan, quiet=quiet)
    if as_json:
        print_json({"format": format_name, "files": files})
    elif output is None:
        click.echo(next(iter(files.values())), nl=False)
    for path, name in paths.items():
        _write(path, files[name], force=force)
        note(f"wrote {path}", quiet=quiet)
    if output is not None or not as_json:
        _note_left_out(list(files), list(paths.values()), quiet=quiet)
    return 0


def _note_model(plan: Plan, *, quiet: bool) -> None:
    names = {item.profile.model.name for item in plan.bins}
    if any("/" not in name for name in names):
        listed = ", ".join(sorted(names))
        note(f"the profile calls the base model {listed}; --model gives vLLM its repository", quiet=quiet)


def _note_left_out(names: Sequence[str], written: Sequence[str], *, quiet: bool) -> None:
    """Say which files of the format were not written; without an output the first one was printed."""
    given = written or names[:1]
    others = [name for name in names if name not in given]
    if others:
        note(f"this is {given[0]}; -o FOLDER also writes {', '.join(others)}", quiet=quiet)


def output_paths(names: Sequence[str], output: str, *, force: bool) -> dict[Path, str]:
    """Where each file of a format goes; for `output` a file, the one that it stands for alone.

    Raises
    ------
    OutputError
        One of them could not be written, or `output` ends as a file of another kind does. Nothing is made.
    """
    from packer.io.files import check_writable

    target = Path(output)
    folder = os.path.isdir(target)
    if not folder and not output.endswith("/"):
        name = _file_meant(names, target)
        if name is not None:
            return {check_writable(target, force=force): name}
    if not folder:
        _check_new_folder(target)
        return {target / name: name for name in names}
    return {check_writable(target / name, force=force): name for name in names}


def _file_meant(names: Sequence[str], target: Path) -> str | None:
    """The file of the format with that name or else that ending; None where the target is a folder."""
    from packer.errors import OutputError

    suffix = target.suffix.lower()
    alike = [name for name in names if Path(name).suffix == _SAME.get(suffix, suffix)]
    if target.name in names:
        return target.name
    if alike:
        return alike[0]
    if _FILE_SUFFIX.fullmatch(suffix):
        known = ", ".join(sorted({Path(name).suffix for name in names}))
        raise OutputError(
            f"{target}: expected a folder or a file that ends in {known}, got the ending {suffix!r}; "
            "a slash at the end makes it a folder."
        )
    return None


def _check_new_folder(target: Path) -> None:
    """Raise `OutputError` if the folder could not be made."""
    from packer.errors import OutputError

    nearest = next((path for path in (target, *target.parents) if os.path.lexists(path)), target)
    if not nearest.is_dir():
        raise OutputError(f"{target}: the folder can't be made: {str(nearest)!r} is a file.")
    if not os.access(nearest, os.W_OK):
        raise OutputError(f"{target}: the folder can't be made: {str(nearest)!r} is not writable.")
    try:
        os.lstat(target)  # finds names that no folder can have
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise OutputError(f"{target}: the folder can't be made: {error}.") from None


def _write(path: Path, text: str, *, force: bool) -> None:
    from packer.errors import OutputError
    from packer.io.files import write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path.parent}: the folder can't be made: {error}.") from None
    write_text(path, text, force=force)
