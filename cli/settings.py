"""The server that a command is about: its profile, and settings that override the profile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import packer
from packer.cli.declare import Readers, bundle, pairs, shared_help
from packer.cli.options import DEFAULT_PROFILE, Output, common, numbers
from packer.errors import ValidationError, shown

if TYPE_CHECKING:
    from packer.speculation import SpeculationSpec


def switch(text: str) -> bool:
    """Type of a value: on or off."""
    found = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}.get(text.lower())
    if found is None:
        raise ValidationError(f"Expected on or off, got {shown(text)}.")
    return found


def _speculation(text: str) -> SpeculationSpec:
    """Type of a value: a method and its settings, as eagle3:num_speculative_tokens=3,acceptance=0.6."""
    from packer.speculation import SpeculationSpec

    return SpeculationSpec.parse(text)


NO_LAW = {
    "pipeline-parallel-size": "stages of a pipeline are not estimated; plan servers of --tensor-parallel-size GPUs",
    "enable-expert-parallel": "experts on GPUs of their own took as long as tensor-parallel ones where they were "
    "measured; leave it out (with --data-parallel-size it is on)",
}
"""Settings of vLLM that are refused, with the reason."""
NO_PROFILE = dict.fromkeys(
    ("gpu", "model"),
    "this command takes a profile: packer profiles estimate --gpu GPU --model MODEL -o FILE.toml, then --profile "
    "FILE.toml",
)
"""Options of other commands that are refused if a command takes one profile, with the reason."""
CHOSEN = dict.fromkeys(
    ("max-loras", "max-lora-rank"),
    "the plan chooses it for each server; packer simulate WORKLOAD --max-loras N shows one server with it",
)
OF_LOGS = dict.fromkeys(
    ("rank", "ranks"),
    "the workload has the ranks; packer workload from-log LOG --ranks FILE.csv -o fleet.csv makes one of a log",
)
"""Options of other commands that are refused if a command plans for a workload, with the reason."""
ENGINE_SETTINGS: Readers = {
    **dict.fromkeys(("max-num-seqs", "max-model-len", "max-num-queued-reqs"), numbers(int)),
    "gpu-memory-utilization": numbers(float),
    "vllm-version": lambda text: (text.removeprefix("v"),),
    "block-size": numbers(int),
    "prefix-caching": lambda text: (switch(text),),
    "async-scheduling": lambda text: (switch(text),),
    "scheduling-policy": lambda text: (text,),
    "speculation": lambda text: (_speculation(text),),
    "warm-start": lambda text: (switch(text),),
}
SERVER_SETTINGS: Readers = {
    "tensor-parallel-size": numbers(int),
    "data-parallel-size": numbers(int),
    "quantization": lambda text: (text,),
    **ENGINE_SETTINGS,
}
"""`ENGINE_SETTINGS`, and settings of a server given by its GPU and model. Readers return a tuple of values."""


@bundle
class EngineSettings:
    """Settings of one server that override its profile."""

    settings: dict[str, tuple[Any, ...]] = pairs(
        "--set", names=ENGINE_SETTINGS, refused=NO_LAW | NO_PROFILE, help=shared_help()["set"]
    )

    @property
    def engine(self) -> dict[str, Any]:
        """The given settings, each with its only value. Raises `UsageError` if one has several values."""
        for name, values in self.settings.items():
            if len(values) != 1:
                raise click.UsageError(f"Expected one {name.replace('_', '-')}, got {len(values)}.")
        return {name: values[0] for name, values in self.settings.items()}


@bundle
class ServerSettings(EngineSettings):
    """Settings of a server that --gpu and --model name."""

    settings: dict[str, tuple[Any, ...]] = pairs(
        "--set", names=SERVER_SETTINGS, refused=NO_LAW, help=shared_help()["set-of-gpu"]
    )


def label_of(profile: packer.Profile) -> str:
    """Label of a profile, which says if it is the default profile."""
    source = click.get_current_context().get_parameter_source("profile_name")
    return f"{profile.label} (the default profile)" if source is ParameterSource.DEFAULT else profile.label


@bundle
class OneProfile(EngineSettings):
    """The server that a command is about."""

    profile_name: str = common("profile", default=DEFAULT_PROFILE)

    def profile(self, out: Output) -> packer.Profile:
        """The profile with the engine settings that were given; an estimate is announced."""
        from packer.twin.override import with_engine

        profile = with_engine(packer.load_profile(self.profile_name), **self.engine)
        out.note_profiles(profile)
        return profile
