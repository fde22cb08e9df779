"""Export formats by name, each a function `render(servers, options) -> {file name: text}`, and paths of their files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from packer.errors import IncompatibleError, OutputError, UnknownNameError, ValidationError, shown
from packer.io.files import check_writable
from packer.io.shipped import table
from packer.public import public

if TYPE_CHECKING:
    from packer.export.servers import ExportedServer, Options
    from packer.plan import Plan

    Render = Callable[[tuple[ExportedServer, ...], Options], dict[str, str]]

_VERSION = re.compile(r"v?\d{1,4}(\.\d{1,4}){0,3}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Versions:
    """Range of versions of a stack that a format was checked against; `last` None: `first` and later."""

    stack: str
    first: str
    last: str | None = None

    def __str__(self) -> str:
        if self.last is None:
            return f"{self.stack} {self.first} and later"
        return f"{self.stack} {self.first}" + ("" if self.last == self.first else f" to {self.last}")

    def check(self, version: str) -> None:
        """Check the version in use; a patch release such as 0.7.3 counts as its minor release, 0.7. Raises
        `ValidationError`: `version` is not a version; `IncompatibleError`: it is outside the range."""
        if not _VERSION.fullmatch(version):
            raise ValidationError(f"Expected a version of {self.stack} as {self.first}, got {shown(version)}.")
        given, first, last = (_parts(each or version) for each in (version, self.first, self.last))
        if given[: len(first)] < first or given[: len(last)] > last:
            rule = f"Expected {self}, which this format was checked against"
            raise IncompatibleError(f"{rule}, got {self.stack} {version}.")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.removeprefix("v").split("."))


@dataclass(frozen=True, slots=True)
class Format:
    """A format: the versions that it was checked against, and the engine that it starts.

    `where`: module and name of the render function. `engine` None: the format starts no server and names no base model.
    `by_load`: the stack's router splits a replicated adapter by load, not by the planned shares. `pods`: the format
    starts pods (`packer.export.kubernetes`). `image`: the files name a container image. `ranks_apart`: the stack starts
    each data-parallel rank as a server.
    `routes`: the files contain the routes of adapters. `own_ports`: the stack chooses the servers' ports, `own_vllm`:
    without an image from the user, the version of vLLM.
    `loads`: the file that loads adapters alone, which a plan of requests to the base model does not have.
    """

    where: str
    fits: Versions | None = None
    engine: str | None = None
    by_load: bool = False
    pods: bool = False
    image: bool = False
    ranks_apart: bool = False
    routes: bool = False
    own_ports: bool = False
    own_vllm: bool = False
    loads: str = ""

    @property
    def render(self) -> Render:
        """The render function."""
        module, _, name = self.where.partition(":")
        function: Render = getattr(import_module(f"packer.export.{module}"), name)
        return function


FORMATS = {
    name: Format(**row | {"fits": Versions(*row["fits"]) if "fits" in row else None})
    for name, row in table("packer.export", "formats.toml").items()
}


@public
def export_plan(
    plan: Plan, format_name: str, options: Options | None = None, *, stack_version: str | None = None,
    numbers: Sequence[int] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Files of a format, by name, with the main file first. Files from plans with doubtful profiles carry a comment.
    Files that would be empty are left out: a plan of requests to the base model alone has no adapters to load.

    `stack_version`: version of the stack that the files are for; None: not checked.
    `numbers`: numbers of the servers in names and addresses, as `Period.servers` of a schedule; None: from 0.

    Raises `UnknownNameError`: no format has that name, or the plan lacks the GPU that a node label is for;
    `IncompatibleError`: the plan is infeasible, the format does not fit the stack's version, starts another engine than
    the plan's, can't read the source of an adapter, or its pods lack a volume, a token or an image for their GPUs;
    `ValidationError`: an adapter has no source although a table was given, a server has no valid port or address, or
    the folder of adapters can't be mounted.
    """
    from packer.export.kubernetes import check_pods
    from packer.export.makers import check_image
    from packer.export.nodes import short_name
    from packer.export.servers import Options, check_models, servers

    if format_name not in FORMATS:
        raise UnknownNameError("export format", format_name, FORMATS)
    chosen, kind = options or Options(), FORMATS[format_name]
    if stack_version is not None:
        if kind.fits is None:
            rule = f"The format {format_name} is for no stack with versions: leave out --stack-version."
            raise IncompatibleError(rule)
        kind.fits.check(stack_version)
    found = servers(plan, chosen, numbers)
    gpus = {short_name(item.profile.gpu.name) for item in plan.bins}
    if unused := sorted(chosen.node_labels.keys() - gpus - {""}):
        raise UnknownNameError("GPU of --node-label", unused[0], gpus)
    if kind.engine is not None:
        _check_engine(plan, format_name)
        check_models(found, chosen)
    if ":" in chosen.adapters_dir and (chosen.adapters_claim or format_name == "compose"):
        rule = "Expected a folder of adapters without a colon, as neither Kubernetes nor Docker mounts one with it"
        raise ValidationError(f"{rule}, got {shown(chosen.adapters_dir)}.")
    if kind.image:
        check_image((item.profile.gpu.name for item in plan.bins), chosen.image)
    files = {name: text for name, text in kind.render(found, chosen).items() if text}
    if kind.pods:
        check_pods(found, chosen)
    estimates = dict.fromkeys(ascii(item.profile.label)[1:-1] for item in plan.bins if item.profile.doubts)
    notes = [f"Planned with the profile {name}: expect large errors." for name in estimates]
    if any(item.profile.engine.warm_start for item in plan.bins):
        notes.append("Planned with warm_start: send a request to each adapter of a server before it takes traffic.")
    return {name: _marked(name, text, notes) for name, text in files.items()}


def _marked(name: str, text: str, notes: Iterable[str]) -> str:
    """The file with a comment for each of these lines of ASCII; JSON, which has no comments, is unchanged."""
    comments = "".join(f"# {note}\n" for note in notes)
    first, newline, rest = text.partition("\n")
    if name.endswith(".json") or not comments:
        return text
    return f"{first}{newline}{comments}{rest}" if first.startswith("#!") else comments + text


def start_commands(plan: Plan) -> list[str]:
    """The shell command that starts each server, with adapters in `/adapters`; raises as `export_plan`."""
    from shlex import join

    from packer.export.hosts import sglang_command
    from packer.export.servers import ExportedServer, Options, check_models, servers

    commands = {"vllm": ExportedServer.command, "sglang": sglang_command}
    options, found = Options(), []
    check_models(started := servers(plan, options), options)
    for server in started:
        engine = server.bin.profile.engine.name.lower()
        if engine not in commands:
            raise UnknownNameError("engine", engine, commands)
        found.append(join(commands[engine](server, options.port)))
    return found


def _check_engine(plan: Plan, format_name: str) -> None:
    """Raise `IncompatibleError` if the format can't start the engine, or the data-parallel ranks, of a profile."""
    wanted = FORMATS[format_name].engine
    for item in plan.bins:
        engine = item.profile.engine.name.lower()
        if FORMATS[format_name].ranks_apart and item.profile.engine.data_parallel_size > 1:
            remedy = "Use --format kserve or aibrix" if engine == "vllm" else "Only routing can be exported"
            rule = f"--format {format_name} does not start servers of several data-parallel ranks,"
            raise IncompatibleError(f"{rule} as {shown(item.profile.name)} is: each rank is a replica there. {remedy}.")
        if engine != wanted:
            fitting = [name for name, kind in FORMATS.items() if kind.engine == engine]
            remedy = f"Formats for it: {', '.join(fitting)}" if fitting else "Only routing can be exported"
            rule = f"Expected a plan for {wanted}, which --format {format_name} starts, got one whose profile"
            raise IncompatibleError(f"{rule} {shown(item.profile.name)} describes {shown(engine)}. {remedy}.")


_SAME = {".yml": ".yaml"}
_FILE_SUFFIX = re.compile(r"\.[a-z][a-z0-9]{1,5}")  # Usual suffixes of files; `.d` or `.2` may end a folder's name.


def output_paths(names: Sequence[str], output: str, *, force: bool) -> dict[Path, str]:
    """Paths of a format's files, path → name; of the one that a file `output` means. Raises `OutputError`."""
    target = Path(output)
    if os.path.isdir(target):
        return {check_writable(target / name, force=force): name for name in names}
    name = None if output.endswith("/") else _file_meant(names, target)
    if name is not None:
        return {check_writable(target, force=force): name}
    return {target / name: name for name in names}


def _file_meant(names: Sequence[str], target: Path) -> str | None:
    """The file of the format with the target's name, or else its suffix; None if the target is a folder."""
    suffix = target.suffix.lower()
    alike = [name for name in names if Path(name).suffix == _SAME.get(suffix, suffix)]
    if target.name in names:
        return target.name
    if alike:
        return alike[0]
    if _FILE_SUFFIX.fullmatch(suffix):
        known = ", ".join(sorted({Path(name).suffix for name in names}))
        rule = f"expected a folder or a file that ends in {known}, got the ending {suffix!r}"
        raise OutputError(f"{target}: {rule}; a slash at the end makes it a folder.")
    return None
