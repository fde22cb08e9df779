"""What one running server answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.errors import LiveError
from packer.io.web import Address
from packer.live import host
from packer.live.fleet_file import Host, StepLimits


@pytest.mark.parametrize("status", [401, 0])
@pytest.mark.parametrize("before", range(host.ERROR_TEXT - 60, host.ERROR_TEXT, 5))
def test_a_long_error_shows_no_part_of_the_key(before: int, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers repeat the key; it is masked before an error is cut to its length."""
    key = "sesame-4711" * 4
    monkeypatch.setattr(host, "get", lambda *_: (status, "." * before + key))
    server = host.RunningServer(Host("http://h"), Address("http://h", f"Bearer {key}"), StepLimits())
    with pytest.raises(LiveError) as caught:
        server.metrics()
    assert "s" not in str(caught.value).partition("/metrics:")[2]


def test_a_server_that_takes_no_adapters_is_told_from_one_without_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no route for loads unless a variable says so; with it, 404 is about the adapter's files."""
    answers = {"/v1/models": (200, '{"data": []}'), "/v1/load_lora_adapter": (404, '{"detail":"Not Found"}')}
    monkeypatch.setattr(host, "get", lambda _where, path, *_: answers[path])
    server = host.RunningServer(Host("http://h", "gpu-0"), Address("http://h"), StepLimits())
    with pytest.raises(LiveError, match="HTTP 404: Not Found: it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        server.load("a", "/a")
    answers["/v1/load_lora_adapter"] = (404, '{"error": {"message": "No adapter found for /a"}}')
    with pytest.raises(LiveError, match=r"HTTP 404: No adapter found for /a\.$"):
        server.load("a", "/a")


def test_the_name_of_a_server_is_one_word_of_its_commands(tmp_path: Path) -> None:
    """A shell neither splits nor runs what a name or an address holds."""
    name, url = "two  words; $(touch gone)", "http://h/a&b"
    server = host.RunningServer(Host(url, name), Address(url), StepLimits())
    server.command(f"printf '%s|' {{name}} {{url}} > '{tmp_path}/said'")
    assert (tmp_path / "said").read_text() == f"{name}|{url}|"
