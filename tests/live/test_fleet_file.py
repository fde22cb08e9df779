"""The file of the servers that packer may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from packer.errors import FileFormatError
from packer.export.formats import export_plan
from packer.live.fleet_file import Host, LiveFleet, RouterFile, read_live_fleet
from packer.plan import Plan


def test_a_file_of_servers_says_where_it_is_wrong(tmp_path: Path) -> None:
    """A wrong key, address or format is an error with its place."""
    path = tmp_path / "servers.toml"
    for text, message in (
        ('[[servers]]\nurl = "gpu-0"', "schema"),
        ('schema = 1\n[[servers]]\nurl = "gpu-0"', "address like http://"),
        (
            'schema = 1\n[[servers]]\nurl = "http://LOCALHOST"\n[[servers]]\nurl = "http://u:p@127.0.0.1:80/"',
            "'http://127.0.0.1:80' twice",
        ),
        (
            'schema = 1\n[[servers]]\nurl = "http://[::1]:8000"\n[[servers]]\nurl = "http://localhost:8000"',
            "'http://127.0.0.1:8000' twice",
        ),
        ('schema = 1\n[[servers]]\nurl = "http://a"\nport = 1', "unknown key"),
        ('schema = 1\n[[servers]]\nurl = "http://a"\nstart = "run {gpu}"', "only {name}, {url}"),
        ('schema = 1\nadapters = "/{name.__class__}"\n[[servers]]\nurl = "http://a"', "only {name}, {url}"),
        ('schema = 1\nadapters = "{name:>999999999}"\n[[servers]]\nurl = "http://a"', "only {name}, {url}"),
        ('schema = 1\n[[servers]]\nurl = "http://a"\n[router]\nformat = "k8s"\nfile = "x"', "a format among"),
        ('schema = 1\nstate = "."\n[[servers]]\nurl = "http://a"', "key 'state': expected a file, got a folder"),
    ):
        path.write_text(text)
        with pytest.raises(FileFormatError, match=message):
            read_live_fleet(path)
    path.write_text('schema = 1\n[[servers]]\nurl = "http://a"\n[router]\nformat = "nginx"\nfile = "n.conf"')
    found = read_live_fleet(path)
    assert found.state == str(tmp_path / "servers.state.json")
    assert found.router == RouterFile("nginx", str(tmp_path / "n.conf"))


def test_adapters_lie_where_exports_say(toy_plan: Callable[..., Plan]) -> None:
    """Live commands load an adapter from the folder that `packer export` names; a repository keeps its name."""
    names = ["org/sql", "..", "gr\u00f6\u00dfe", "two words", "a{b}"]
    commands = json.loads(export_plan(toy_plan(names, gpus=1), "vllm")["args.json"])[0]["command"]
    paths = {found["name"]: found["path"] for found in (json.loads(word) for word in commands if word[0] == "{")}
    assert {name: LiveFleet((Host("http://a"),)).path_of(name, 8) for name in names} == paths
    assert LiveFleet((Host("http://a"),), adapters="{name}").path_of("org/sql", 8) == "org/sql"
