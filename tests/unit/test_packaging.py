"""The wheel holds what the disk holds, and the three folders have one importable name."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import whale

ROOT = Path(__file__).resolve().parents[2]


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _packages_on_disk() -> set[str]:
    found = set()
    for top, name in (("whale", "whale"), ("planner", "whale.planner"), ("strategies", "whale.strategies")):
        for folder, subfolders, files in os.walk(ROOT / top):  # does not follow the symlinks in whale/
            subfolders[:] = [sub for sub in subfolders if sub != "__pycache__"]
            if any(file.endswith(".py") for file in files):
                found.add(".".join((name, *Path(folder).relative_to(ROOT / top).parts)))
    return found


def test_packages_of_the_wheel_are_those_on_disk() -> None:
    listed = _project()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == _packages_on_disk(), "a forgotten sub-package is silently left out of the wheel"


def test_every_package_has_an_init_file() -> None:
    tops = {"whale.planner": "planner", "whale.strategies": "strategies"}
    for package in _packages_on_disk():
        for name, folder in tops.items():
            if package == name or package.startswith(name + "."):
                package = folder + package.removeprefix(name)
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package


@pytest.mark.parametrize("name", ["planner", "strategies"])
def test_symlinks_are_relative(name: str) -> None:
    assert (ROOT / "whale" / name).is_symlink()
    assert os.readlink(ROOT / "whale" / name) == f"../{name}"


@pytest.mark.parametrize("name", ["planner", "strategies"])
def test_top_level_folders_refuse_any_other_name(name: str) -> None:
    ran = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert "ImportError" in ran.stderr and f"import whale.{name}" in ran.stderr


def test_version_is_the_one_of_the_distribution() -> None:
    project = _project()
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "whale.__version__"}
    assert whale.__version__[0].isdigit()


def test_every_data_file_is_listed_for_the_wheel() -> None:
    listed = _project()["tool"]["setuptools"]["package-data"]
    folders = {"whale": ROOT / "whale", "whale.planner": ROOT / "planner", "whale.strategies": ROOT / "strategies"}
    shipped = {file for name, globs in listed.items() for glob in globs for file in folders[name].glob(glob)}
    for folder in folders.values():
        for parent, subfolders, files in os.walk(folder):
            subfolders[:] = [sub for sub in subfolders if sub != "__pycache__"]
            for file in files:
                assert file.endswith(".py") or Path(parent, file) in shipped, (
                    f"{Path(parent, file)} is not in the wheel"
                )


def test_types_are_published() -> None:
    assert (ROOT / "whale" / "py.typed").is_file()
