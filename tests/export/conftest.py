"""Names that try to break out of every format, and a plan that carries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from packer.export.formats import FORMATS, export_plan
from packer.export.servers import Options
from packer.plan import Plan

HOSTILE_NAMES = (
    "plain",
    "Case",
    "case",
    "a; rm -rf /",
    '"><script>alert(1)</script>',
    "{{7*7}}",
    "../../x",
    "..",
    ".",
    " ",
    "line\u2028break: 1\u2029- x",
    "名前 é \U0001f984",
    "\u2028\u202e\ufeff",
    "$(touch /tmp/x)",
    "`id`",
    "$HOME ${HOME} $$ $(POD)",
    "it's",
    'say "hi"',
    "back\\slash\\",
    "-rf",
    "--port=1",
    "name=path",
    "a,b=c",
    "default",
    "include",
    "hostnames",
    "~^.*$",
    "~*x",
    "a.c",
    "A.C",
    "abc",
    "*.example.com",
    "yes",
    "null",
    "1e3",
    "0x10",
    "1_000",
    "12:30",
    "<<",
    "=",
    "#comment",
    "&anchor",
    "*alias",
    "!tag",
    "%24",
    "os.environ/HOME",
    "x" * 256,
    "é" * 256,
)


@pytest.fixture(scope="session")
def hostile_plan(toy_plan: Callable[..., Plan]) -> Plan:
    """Every hostile name, on three servers; the first one on all of them with shares 1 : 2 : 3."""
    return toy_plan(HOSTILE_NAMES, gpus=3, replicated=True)


@pytest.fixture(scope="session")
def exported() -> Callable[[Plan, str], dict[str, str]]:
    """Files of a format for any plan: what the format needs beside the plan is given."""

    def files(plan: Plan, name: str) -> dict[str, str]:
        options = Options(adapters_claim="adapters")
        if name == "ray":
            options = Options(sources={each: f"s3://loras/{each}" for each in plan.workload.names})
        engine = dataclasses.replace(plan.bins[0].profile.engine, name=FORMATS[name].engine or "vllm")
        bins = [
            dataclasses.replace(item, profile=dataclasses.replace(item.profile, engine=engine)) for item in plan.bins
        ]
        fleet = plan.workload
        if engine.name == "sglang":  # refuses names with spaces at their ends
            odd = [n if n == n.strip() else f"({n})" for n in fleet.names]
            named = (dataclasses.replace(a, name=n) for a, n in zip(fleet.adapters, odd, strict=True))
            fleet = dataclasses.replace(fleet, adapters=tuple(named))
        return export_plan(dataclasses.replace(plan, workload=fleet, bins=tuple(bins)), name, options)

    return files
