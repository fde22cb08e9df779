"""What the documents show can be typed as it stands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from packer.cli import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    if path.parent.name != "prose"  # parts of a page in docs/, checked there
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _blocks(page: str, *languages: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    return [body for language, body in FENCE.findall(text) if language in languages]


def _commands(page: str) -> list[list[str]]:
    """Words of every `packer …` command line in a page's blocks."""
    found = []
    for block in _blocks(page, "", "bash", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|(?!\w)", line):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:
                    continue
                while words and words[0] in {"$", "uv", "run"}:
                    words = words[1:]
                if words[:1] == ["packer"] and len(words) > 1 and "…" not in part:
                    found.append(words[1:])
    return found


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page: str) -> None:
    """Every command line in a document names a command that exists, with options that it takes."""
    wrong = []
    for words in _commands(page):
        command: click.Command | None = cli
        context = click.Context(cli)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            command = command.get_command(context, words[0])
            words = words[1:]
        if command is None:
            wrong.append(f"no such command: {words}")
            continue
        known = {
            opt
            for param in command.get_params(click.Context(command))
            for opt in (*param.opts, *param.secondary_opts, *(f"--{name}" for name in getattr(param, "names", ())))
        }
        known |= {"--help", "-h", "--version"}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        wrong += [f"{command.name} has no {option}" for option in sorted(given - known)]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """A link to a file of the project leads to a file that is there."""
    targets = [t for t in LINK.findall((ROOT / page).read_text("utf-8")) if "://" not in t]
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


def test_every_page_is_linked() -> None:
    """Who reads the documents as files, without the site's menu, comes to each page by a link on another one."""
    linked = {
        (ROOT / page).parent.joinpath(target).resolve()
        for page in PAGES
        for target in LINK.findall((ROOT / page).read_text("utf-8"))
    }
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.resolve() not in linked]
    assert [str(path.relative_to(ROOT)) for path in pages] == []


def test_readme_names_every_command() -> None:
    """A reader of the README learns of each command."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert [name for name in cli.lazy if f"packer {name}" not in text] == []


@pytest.mark.usefixtures("whole_hours")  # the fleet takes more GPUs, and a longer search, for a shorter time
def test_readme_library_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Python block of the README runs as it stands, from the top of a checkout."""
    (code,) = _blocks("README.md", "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "plan.json").is_file()


def test_ci_runs_the_readme_test_command() -> None:
    """What CI calls is what the README tells people to call, to the letter."""
    text = (ROOT / "README.md").read_text("utf-8")
    lines = [line for _, body in FENCE.findall(text) for line in body.splitlines() if "pytest" in line]
    assert len(lines) == 1
    assert lines[0] in (ROOT / ".ci" / "run").read_text("utf-8").splitlines()


def test_the_readme_leads_from_a_clone_to_manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed in order, the README's commands for the shipped example end in Kubernetes manifests."""
    import yaml

    from packer.cli import run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    typed = [words for words in _commands("README.md") if words[0] in ("solve", "export")]
    typed = [words for words in typed if "fleet.csv" not in words]
    assert [words[0] for words in typed] == ["solve", "export", "export"]
    for words in typed:
        assert run(words) == 0, words
    kinds = {document["kind"] for document in yaml.safe_load_all((tmp_path / "packer.yaml").read_text("utf-8"))}
    assert {"Deployment", "Service"} <= kinds
