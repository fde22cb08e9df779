"""What is exported says what it takes for granted: estimates, and servers that start warm."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest
import yaml

from packer.export.formats import FORMATS, export_plan
from packer.plan import Plan
from packer.profile import Profile
from packer.twin.override import with_engine

MARK = "estimated, not calibrated"


def with_profile(plan: Plan, profile: Profile) -> Plan:
    """The plan on servers of another profile."""
    bins = tuple(dataclasses.replace(item, profile=profile) for item in plan.bins)
    return dataclasses.replace(plan, bins=bins)


@pytest.mark.parametrize("format_name", FORMATS)
def test_files_of_an_estimate_say_so(
    toy_plan: Callable[..., Plan],
    toy_profile: Profile,
    exported: Callable[[Plan, str], dict[str, str]],
    format_name: str,
) -> None:
    """Every file made with an uncalibrated profile says so, and none of a calibrated one does."""
    plan = toy_plan(["a", "b"])
    for name, text in exported(plan, format_name).items():
        assert f"toy ({MARK})" in text, name
    calibrated = with_profile(plan, dataclasses.replace(toy_profile, calibrated=True))
    for text in exported(calibrated, format_name).values():
        assert MARK not in text


def test_files_for_an_engine_older_than_its_simulation_say_so(
    toy_plan: Callable[..., Plan], toy_profile: Profile
) -> None:
    """A calibrated profile of vLLM 0.7 is simulated with another schedule: files say that as they do of estimates."""
    old = dataclasses.replace(
        toy_profile, calibrated=True, engine=dataclasses.replace(toy_profile.engine, version="0.7.3")
    )
    (text,) = export_plan(with_profile(toy_plan(["a", "b"]), old), "nginx").values()
    assert text.startswith("# Planned with the profile toy (vLLM 0.7.3 simulated with the schedule of V1)")


def test_files_for_a_warm_start_ask_for_it(toy_plan: Callable[..., Plan], toy_profile: Profile) -> None:
    """A plan for servers that have answered a request to each adapter says in its files that somebody must send it."""
    warm = with_engine(dataclasses.replace(toy_profile, calibrated=True), warm_start=True)
    (text,) = export_plan(with_profile(toy_plan(["a", "b"]), warm), "nginx").values()
    assert text.startswith("# Planned with warm_start: send a request to each adapter of a server before it takes")


@pytest.mark.parametrize("format_name", FORMATS)
def test_names_of_profiles_stay_in_their_comment(
    toy_plan: Callable[..., Plan],
    toy_profile: Profile,
    exported: Callable[[Plan, str], dict[str, str]],
    format_name: str,
) -> None:
    """A profile may be called anything: the mark stays one line of ASCII, and the file means the same."""
    plan = toy_plan(["a", "b"])
    hostile = dataclasses.replace(toy_profile, name="x\nexec rm -rf / #\r\u2028é\x7f'\"")
    plain = exported(plan, format_name)
    for name, text in exported(with_profile(plan, hostile), format_name).items():
        if name.endswith(".json"):
            assert json.loads(text)
            continue
        lines = text.splitlines()
        (mark,) = (line for line in lines if line.startswith("# Planned with"))
        assert mark.isascii()
        assert mark.isprintable()
        assert len(lines) == len(plain[name].splitlines())
        if name.endswith(".yaml"):
            assert list(yaml.safe_load_all(text))


def test_the_script_still_opens_with_its_shell(toy_plan: Callable[..., Plan]) -> None:
    """The mark of a script stands below the line that names its interpreter."""
    lines = export_plan(toy_plan(["a"], gpus=1), "vllm")["start.sh"].splitlines()
    assert lines[0] == "#!/bin/sh"
    assert MARK in lines[1]


def test_the_cluster_and_programs_keep_the_mark(
    toy_plan: Callable[..., Plan], exported: Callable[[Plan, str], dict[str, str]]
) -> None:
    """Comments do not survive an upload: Deployments hold the profile's label, and so does JSON."""
    plan = toy_plan(["a", "b"])
    label = plan.bins[0].profile.label
    for document in yaml.safe_load_all(exported(plan, "k8s")["packer.yaml"]):
        if document["kind"] == "Deployment":
            assert document["metadata"]["annotations"]["packer/profile"] == label
    assert {entry["profile"] for entry in json.loads(export_plan(plan, "vllm")["args.json"])} == {label}
    routing = json.loads(export_plan(plan, "routing")["routing.json"])
    assert routing["profiles"] == dict.fromkeys(routing["servers"], label)
