"""Cluster files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.errors import FileFormatError
from packer.io.clusters import read_cluster
from packer.io.profiles import write_profile
from packer.profile import Profile

GOOD = """\
schema = 1
[[kinds]]
name = "h100"
profile = "h100-64gb/llama-3.1-8b-instruct"
max_loras = 32
max_lora_rank = 16
[[kinds]]
name = "toy"
profile = "toy.toml"
max_loras = 4
[[nodes]]
count = 2
servers = ["h100", "h100"]
[[nodes]]
servers = ["toy"]
[slo]
ttft_ms = 2000
tpot_ms = 100.0
"""


@pytest.fixture
def folder(tmp_path: Path, toy_profile: Profile) -> Path:
    """A folder with a profile."""
    write_profile(toy_profile, tmp_path / "toy.toml")
    return tmp_path


def test_reads_kinds_nodes_and_slo(folder: Path, toy_profile: Profile) -> None:
    """Nodes are repeated `count` times, and a profile's path is relative to the cluster's file."""
    (folder / "cluster.toml").write_text(GOOD)
    cluster = read_cluster(folder / "cluster.toml")
    assert cluster.servers == ("h100",) * 4 + ("toy",)
    assert cluster.kind(4).profile == toy_profile
    assert cluster.kind(0).max_lora_rank == 16
    assert cluster.slo == {"ttft_ms": 2000.0, "tpot_ms": 100.0}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_loras = 32", "max_lora = 32", "unknown key; did you mean 'max_loras'"),
        ("max_loras = 32", "max_loras = -1", r"kinds\.0.*max_loras.*got -1"),
        ('"h100-64gb/llama', '"h10-64gb/llama', "Unknown profile 'h10-64gb.*Known: h100"),
        ('servers = ["toy"]', 'servers = ["tiny"]', "Unknown kind of server 'tiny'.*Known: h100, toy"),
        ('servers = ["toy"]', "servers = []", r"expected at least 1 in the list, got \[\]"),
        ("count = 2", "count = 0", "greater than or equal to 1"),
        ("count = 2", "count = 600_000", "at most 1,000,000 servers"),
        ("ttft_ms = 2000", "ttft = 2000", "Unknown latency limit 'ttft'"),
        ("schema = 1", "schema = 2", "schema"),
        ("schema = 1", "schema = 1\ncolour = 3", "unknown key"),
        ("[slo]", "[slo", "expected TOML"),
        ("schema = 1", '{"n_gpus": 1}', "a cluster in TOML; that of a plan"),
    ],
)
def test_bad_files_name_the_place_and_the_rule(folder: Path, old: str, new: str, message: str) -> None:
    """A wrong key or value is an error with the file, the key and what exists."""
    assert old in GOOD
    path = folder / "cluster.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(FileFormatError, match=message) as error:
        read_cluster(path)
    assert "cluster.toml" in str(error.value)


def test_examples_are_read(root: Path) -> None:
    """The cluster files of the examples have the servers that they describe."""
    examples = root / "examples" / "clusters"
    assert len(read_cluster(examples / "four-h100.toml")) == 4
    caraserve = read_cluster(examples / "caraserve.toml")
    assert len(caraserve) == 60
    assert caraserve.kinds[0].profile.engine.name == "lightllm"
    assert caraserve.slo == {"tpot_ms": 48.0}
