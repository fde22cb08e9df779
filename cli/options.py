"""Bundles of options that several commands share, so that they are typed, explained and checked alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import click

import packer
from packer.cli.declare import argument, bundle, flag, option, shared_help
from packer.cli.output import Part, check_distinct, note, print_json, progress_bar, show
from packer.progress import Progress
from packer.words import counted

DEFAULT_PROFILE = "h100-64gb/llama-3.1-8b-instruct"
LENGTH = click.FloatRange(min=1.0, max=1e7)  # A simulated or measured time, s.
LONGEST_RANGE = 10_000
REGISTERED = ("objective", "router", "solver")
REGISTRY = "packer.registry:names"


def numbers(
    number: type[int] | type[float], *, distinct: bool = False, grid: Sequence[int] = ()
) -> Callable[[str], tuple[float, ...]]:
    """Type of an option: comma-separated numbers, `8,16,32`, and ranges `START:STOP:STEP` with both ends. With a
    `grid`, `LOW..HIGH` means LOW, the grid's numbers in between, and HIGH. `distinct`: sort, drop duplicates."""

    def span(text: str) -> list[float]:
        first, dots, last = text.partition("..")
        if dots and grid:
            low, high = int(first), int(last)
            if low > high:
                raise ValueError
            return [low, *(n for n in grid if low < n < high), high]
        bounds = [number(piece) for piece in text.split(":")]
        if len(bounds) == 1:
            return list(bounds)
        start, stop, step = bounds
        count = int((stop - start) / step + 1e-9) + 1 if step > 0 and stop >= start else 0
        if not 0 < count <= LONGEST_RANGE:
            raise ValueError
        return [start + k * step if number is int else round(start + k * step, 12) for k in range(count)]

    def read(text: str) -> tuple[float, ...]:
        try:
            found = [each for part in text.split(",") for each in span(part)]
        except (ValueError, OverflowError):
            kind = "whole numbers" if number is int else "numbers"
            forms = "8,16,32, START:STOP:STEP or LOW..HIGH" if grid else "8,16,32 or START:STOP:STEP"
            raise click.BadParameter(f"Expected {kind} such as {forms}, got {text[:80]!r}.") from None
        return tuple(sorted(set(found)) if distinct else found)

    return read


def complete(place: str, *arguments: str) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Completion of the names in `place`, module:attribute. A callable attribute is called with the arguments."""

    def names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
        module, attribute = place.split(":")
        found = getattr(import_module(module), attribute)
        known = found(*arguments) if callable(found) else found
        return [name for name in known if name.startswith(incomplete)]

    return names


def complete_models(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Complete repositories of known models, and their names without owner (in lower case if the typed text is)."""
    from packer.fit.models import MODELS

    short = [name.partition("/")[2] for name in MODELS]
    short = [name.lower() for name in short] if incomplete == incomplete.lower() else short
    names = [*MODELS, *short] if incomplete else list(MODELS)
    return [name for name in names if name.startswith(incomplete)]


HOURS, GPUS = click.FloatRange(min=1.0, max=1e8), complete("packer.twin.datasheets:GPUS")
COMMON: dict[str, dict[str, Any]] = {
    "at": {"default": "peak", "metavar": "peak|mean|each-peak|pNN"},
    "duration": {"type": LENGTH, "metavar": "SECONDS"},
    "gpu": {"metavar": "NAME|FILE.toml", "shell_complete": GPUS},
    "gpus": {"type": click.IntRange(min=1, max=1_000_000), "metavar": "N"},
    "margin": {"type": click.FloatRange(min=0.0, max=10.0), "metavar": "X"},
    "max-lora-rank": {"type": int, "metavar": "RANK"},
    "max-replicas": {"type": click.IntRange(min=1, max=10_000), "metavar": "N"},
    "model": {"metavar": "NAME|PATH", "shell_complete": complete_models},
    **{name: {"metavar": "NAME", "shell_complete": complete(REGISTRY, name)} for name in REGISTERED},
    "output": {"flags": ("-o", "--output"), "metavar": "FILE"},
    "plot": {"metavar": "FILE"},
    "predictor": {"metavar": "NAME|PATH", "shell_complete": complete(REGISTRY, "predictor"), "default": "twin"},
    "profile": {"metavar": "NAME|FILE.toml", "shell_complete": complete("packer.io.profiles:profile_names")},
    "rate-factor": {"type": float, "default": 1.0, "metavar": "X"},
    "seed": {"type": click.IntRange(min=0, max=2**32 - 1), "default": 0},
    "slo": {"multiple": True, "metavar": "[CLASS:]KEY=MS,…"},
    "time-limit": {"type": click.FloatRange(min=0.0, min_open=True), "metavar": "SECONDS"},
    "tuning": {"metavar": "POLICY", "shell_complete": complete(REGISTRY, "tuning policy")},
    "window": {"type": HOURS, "default": 3600.0, "metavar": "SECONDS"},
}
"""Options of several commands: the arguments of `option` for each, except its help (in `options.toml`)."""


def common(name: str, **attributes: Any) -> Any:
    """Declare an option of `COMMON`; `attributes` override its own."""
    text = {"help": shared_help()[name]} if name in shared_help() else {}
    given = {"flags": (f"--{name}",), **text, **COMMON[name], **attributes}
    return option(*given.pop("flags"), **given)


def waited_s() -> float:
    """Time since the command started, s."""
    started = click.get_current_context().find_root().obj
    return 0.0 if started is None else time.monotonic() - float(started)


@bundle
class Output:
    """What a command prints: tables, JSON, or nothing.

    as_json: Print JSON instead of tables.
    quiet: Print only errors.
    """

    as_json: bool = flag("--json", everywhere=True)
    quiet: bool = flag("-q", "--quiet", everywhere=True)

    def note(self, message: str) -> None:
        """Print a message to standard error, unless quiet."""
        note(message, quiet=self.quiet)

    def note_profiles(self, *profiles: packer.Profile) -> None:
        """Note profiles with large errors, drafters without a time, and settings with which fewer GPUs suffice."""
        for profile in dict.fromkeys(profiles):
            if profile.doubts:
                from packer.fit.bands import bands_in_words

                said = bands_in_words(profile) or "expect large errors"
                self.note(f"the profile {profile.label}: {said}.")
            drafts = profile.engine.speculation
            if drafts is not None and not drafts.draft_pass_ms + drafts.draft_token_ms:
                self.note("the drafter's passes take no time here; draft_pass_ms of speculation gives it.")
            if "fewer GPUs" in profile.provenance:
                gpus = counted(profile.engine.gpus, "GPU")
                self.note(f"each server of {profile.gpu.name} has {gpus}; {profile.provenance['fewer GPUs']}.")
            if "left out" in profile.provenance:
                self.note(f"left out: {profile.provenance['left out']}")

    def progress(self, what: str = "starting") -> AbstractContextManager[Progress]:
        """Show a progress bar on a terminal, unless quiet. `what`: what is done before its first update."""
        return progress_bar(what, quiet=self.quiet)

    def result(self, data: Any, parts: Callable[[], Sequence[Part]]) -> None:
        """Print `data` as JSON, or `parts` as text. Functions are called only if their result is printed."""
        if self.as_json:
            print_json(data() if callable(data) else data)
        elif not self.quiet:
            show(*parts())


@bundle
class Writing(Output):
    """Output options of a command that writes files.

    force: Overwrite output files that exist.
    """

    force: bool = flag(everywhere=True)

    def check(self, *paths: str | None, what: str = "", endings: tuple[str, ...] = ()) -> None:
        """Check before long work that results can be written to the paths. Raises `ValidationError`: a path has none of
        `endings`, or else of `what` (as in `packer.io.files.ENDINGS`); `OutputError`: it can't be written."""
        from packer.io.files import check_ending, check_writable

        for path in (each for each in paths if each is not None):
            if what:
                check_ending(path, what, endings)
            check_distinct(path)
            check_writable(path, force=self.force)


@bundle
class PlanArgument:
    """A finished plan."""

    plan_path: str = argument("PLAN")

    def plan(self, *, changed: bool = False) -> packer.Plan:
        """Read the plan. `changed`: it was edited by hand, so do not check its figures."""
        return packer.load_plan(self.plan_path, changed=changed)


@bundle
class FleetFile:
    """A workload."""

    workload_path: str = argument("WORKLOAD")

    def fleet(self) -> packer.Workload:
        """Read the workload. Notes say how a trace of requests was read."""
        found = packer.read_workload(self.workload_path)
        for text in () if found.arrivals.trace is None else found.arrivals.trace.notes:
            note(text, quiet=bool(click.get_current_context().params.get("quiet")))
        return found
