"""Names that try to break out of every format, and a plan that carries them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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
