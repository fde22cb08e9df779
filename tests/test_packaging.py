"""What is installed is what the tree holds, and nothing outside `packer`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def setuptools_table(root: Path) -> dict[str, Any]:
    """The setuptools table of pyproject.toml."""
    with (root / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["tool"]["setuptools"]
    return table


def _folder_of(package: str, table: dict[str, Any]) -> Path:
    """Folder of a package, by the longest prefix in package-dir."""
    mapping: dict[str, str] = table["package-dir"]
    prefix = max((name for name in mapping if f"{package}.".startswith(f"{name}.")), key=len)
    rest = package[len(prefix) :].strip(".")
    return Path(mapping[prefix], *([*rest.split(".")] if rest else []))


def _expected_files(root: Path, table: dict[str, Any]) -> set[str]:
    """Wheel paths of every module and data file of the listed packages."""
    expected = set()
    for package in table["packages"]:
        folder = root / _folder_of(package, table)
        files = list(folder.glob("*.py"))
        for pattern in table["package-data"].get(package, []):
            files += [path for path in folder.glob(pattern) if path.is_file()]
        expected |= {f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}" for path in files}
    return expected


def test_every_folder_with_code_is_listed(
    root: Path, folders: dict[str, str], setuptools_table: dict[str, Any]
) -> None:
    """A folder with an __init__.py that pyproject.toml doesn't list would be missing from the wheel."""
    found = set()
    for package, folder in folders.items():
        for init in (root / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(root / folder).parts
            if not (package == "packer" and parts and (root / "packer" / parts[0]).is_symlink()):
                found.add(".".join([package, *parts]))
    assert found == set(setuptools_table["packages"])


def test_every_module_stands_in_a_package(root: Path, modules: list[Any]) -> None:
    """A module in a folder without __init__.py works in the checkout and is missing from the wheel."""
    assert [m.path for m in modules if not (m.path.parent / "__init__.py").is_file()] == []


def test_every_data_file_is_listed(root: Path, folders: dict[str, str], setuptools_table: dict[str, Any]) -> None:
    """Profiles, models, templates and py.typed travel: what no pattern matches would stay behind."""
    expected = _expected_files(root, setuptools_table)
    left = []
    for package, folder in folders.items():
        for path in (root / folder).rglob("*"):
            inside = path.relative_to(root / folder)
            linked = package == "packer" and (root / "packer" / inside.parts[0]).is_symlink()
            hidden = any(part.startswith(".") or part == "__pycache__" for part in inside.parts)
            if path.is_file() and not linked and not hidden:
                name = f"{package.replace('.', '/')}/{inside.as_posix()}"
                if name not in expected and path.suffix != ".md":
                    left.append(name)
    assert left == []


def test_links_lead_to_the_folders(root: Path, folders: dict[str, str]) -> None:
    """Tools that only read the tree find packer.twin and the others through links."""
    for package, folder in folders.items():
        if package != "packer":
            link = root / "packer" / folder
            assert link.is_symlink()
            assert link.resolve() == root / folder


def test_wheel_holds_packer_alone_and_all_of_it(root: Path, setuptools_table: dict[str, Any], tmp_path: Path) -> None:
    """The wheel of a clean copy holds every module and data file, under packer/, and nothing else."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy / name)
    for folder in setuptools_table["package-dir"].values():
        ignore = shutil.ignore_patterns("__pycache__", ".*", "*.tmp")
        shutil.copytree(root / folder, copy / folder, symlinks=True, ignore=ignore)
    build = [sys.executable, "-m", "build", "--wheel", "--installer", "uv", "--outdir", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == _expected_files(copy, setuptools_table)


def test_a_script_beside_a_clone_finds_the_package(root: Path, tmp_path: Path) -> None:
    """The folder of a clone that is called packer does not hide the package from a script beside it."""
    (tmp_path / "packer").symlink_to(root)
    script = tmp_path / "script.py"
    script.write_text("import packer\nprint(packer.Adapter('a', 8, 1.0).rank)\n", "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "8\n", done.stderr
