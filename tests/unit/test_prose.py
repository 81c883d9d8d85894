"""``scripts/prose``: planted faults are reported with file, line and advice; plain English passes."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prose"


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    """The script as a module."""
    loader = importlib.machinery.SourceFileLoader("prose_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


CODE = '''"""Seconds of a step."""

# Measured are the layers,
# then nobody waits.
occupancy = 3  # a name in code is not prose


def step(rows: int) -> int:
    """What a rank does in a step.

    >>> quickest = step(2)
    """
    if rows < 0:
        raise ValueError(f"the batch of {rows} rows is one of so many rows")
    return rows
'''


def test_planted_faults_in_code_are_reported_at_their_lines(prose: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(CODE, encoding="utf-8")
    found = prose.check([file], proselint=False)
    assert [(finding.line, finding.advice.split("'")[1]) for finding in found] == [
        (3, "Measured are"),
        (4, "nobody"),
        (9, "¶ What"),
        (14, "so many"),
    ]
    assert found[0].file == str(file)
    assert "the subject first" in found[0].advice


MARKDOWN = """# Plans

The fastest plan runs as `quickest`.

```sh
whale quickest
```

A plan is
dealt out, and the
the quickest wins.
"""


def test_markdown_is_checked_without_its_code(prose: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "planted.md"
    file.write_text(MARKDOWN, encoding="utf-8")
    found = prose.check([file], proselint=False)
    assert [(finding.line, finding.advice.split("'")[1]) for finding in found] == [
        (10, "dealt out"),
        (10, "the the"),
        (11, "quickest"),
    ]


def test_proselint_checks_the_same_text(prose: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("proselint", reason="proselint is installed with the dev extra")
    file = tmp_path / "planted.md"
    file.write_text("# Plans\n\nFirst of all, the planner is\nvery unique.\n", encoding="utf-8")
    found = prose.check([file])
    assert {finding.line for finding in found} == {3, 4}
    assert any(finding.advice.endswith("(uncomparables)") for finding in found), "each names its check"


def test_command_exits_with_1_if_it_finds_something(tmp_path: Path) -> None:
    pytest.importorskip("proselint", reason="proselint is installed with the dev extra")
    file = tmp_path / "planted.md"
    file.write_text("The quickest plan.\n", encoding="utf-8")
    ended = subprocess.run([sys.executable, str(SCRIPT), str(file)], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"{file}:1: 'quickest': fast, faster, fastest" in ended.stdout
