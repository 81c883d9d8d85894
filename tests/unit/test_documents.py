"""Checks of the documents: links resolve, commands have options that exist, examples parse, and the README's commands
are where the checks expect them."""

import importlib
import inspect
import json
import re
import shlex
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import click
import pytest

import whale
from benchmarks import gpus
from benchmarks.testbed import Description
from whale import Cluster, Plan, errors
from whale.cli.app import app
from whale.cli.gpu import PARTS
from whale.ir.cluster import DeviceType

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("docs", "examples", "benchmarks")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(document for top in TOPS for document in ROOT.glob(f"{top}/**/*.md"))])


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _prose(document: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _blocks(document: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _anchors(document: Path) -> set[str]:
    """GitHub's anchors of the document's headings: lower case, hyphens for spaces, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", _prose(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_relative_links_lead_to_files_and_to_their_headings(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)[^)]*\)", _prose(document)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file = document.parent / target if target else document
        assert file.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in _anchors(file), f"{document.name} links to {target}#{anchor}"


def test_every_page_of_the_guide_can_be_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([a-z-]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_files_of_the_strangers_test_exist() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Where would I change X?\n")[1]
    questions = section.split("\n## ")[0]
    room, answered = "", dict[str, int]()
    rows = re.findall(r"^\| (?:`([\w/]+)` )?\| [^|]* \| `([\w/.]+)` \|$", questions, flags=re.MULTILINE)
    for named, file in rows:
        room = named or room
        assert (ROOT / room / file).is_file(), f"CONTRIBUTING.md answers with {room}/{file}"
        answered[room] = answered.get(room, 0) + 1
    assert answered
    assert set(answered.values()) == {3}
    changes = section.split("\n## What a change touches\n")[1].split("\n## ")[0]
    for path in re.findall(r"`([\w/]+(?:/[\w.]+)+)`", changes):
        assert (ROOT / path).exists(), f"CONTRIBUTING.md names {path}"


def _commands(document: Path) -> list[list[str]]:
    """The arguments of every ``whale`` command in the document's shell blocks."""
    found = []
    for block in _blocks(document, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            names = [Path(word).name for word in words]
            if "whale" in names and "pip" not in names:
                found.append(words[names.index("whale") + 1 :])
    return found


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if _commands(document)], ids=_name)
def test_commands_have_options_that_exist(document: Path) -> None:
    for arguments in _commands(document):
        command: click.Command = app
        rest = list(arguments)
        while isinstance(command, click.Group) and rest and rest[0] in command.commands:
            command = command.commands[rest.pop(0)]
        assert command is not app, f"{document.name}: whale {' '.join(arguments)}"
        command.make_context(command.name, rest)


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if _blocks(document, "python")], ids=_name)
def test_examples_in_python_are_python(document: Path) -> None:
    for block in _blocks(document, "python"):
        compile(textwrap.dedent(block), document.name, "exec")


def test_readme_has_exactly_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("\n## Two commands\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    assert "torchrun --nproc-per-node 2 examples/quickstart.py" in blocks[0]
    assert "pytest" in blocks[1]


def test_exit_codes_in_the_guide_are_those_of_the_errors() -> None:
    guide = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    documented = {}
    for names, code in re.findall(r"^\| ([^|]*) \| [^|]*\| (\d+) \|", guide, flags=re.MULTILINE):
        documented.update({name: int(code) for name in re.findall(r"`(\w+)`", names)})
    assert documented == {name: getattr(errors, name).exit_code for name in errors.__all__}


def _named(path: str) -> object:
    """The object that a directive of the reference names."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        home, _, name = path.rpartition(".")
        return getattr(importlib.import_module(home), name)


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: ([\w.]+)$", reference, flags=re.MULTILINE)
    assert {f"whale.{name}" for name in whale.__all__} <= {*paths, "whale.WhaleError", "whale.__version__"}
    assert "`whale.__version__`" in reference
    for path in paths:
        found = _named(path)
        members = vars(found) if inspect.isclass(found) else {}
        public = [value for name, value in members.items() if not name.startswith("_") and callable(value)]
        for documented in (found, *public):
            assert inspect.getdoc(documented), f"{path}: {documented} has no docstring"


def test_every_page_of_the_guide_is_in_the_navigation_of_mkdocs_yml() -> None:
    listed = set(re.findall(r"- (?:[\w ]+: )?([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    assert listed == {
        _name(page) for page in DOCUMENTS if page.parent in (ROOT, ROOT / "docs", ROOT / "docs" / "tutorials")
    }


def test_cluster_file_of_the_guide_is_read() -> None:
    (example,) = _blocks(ROOT / "docs" / "cluster-files.md", "toml")
    known = DeviceType.of("A100-SXM4-80GB", speed={"float32": 19.5e12}, memory_bytes=80 * 2**30, memory_bandwidth=2e12)
    cluster = Cluster.parse(example, catalog={known.name: known})
    assert [len(node.ranks) for node in cluster.nodes] == [8, 8, 4]


def test_plan_of_the_guide_is_read() -> None:
    (example,) = _blocks(ROOT / "docs" / "plans.md", "json")
    plan = Plan.parse(example.replace("...", "0123456789abcdef"))
    assert [len(stage.ranks) for stage in plan.stages] == [4, 4]


def test_testbed_of_the_guide_is_read() -> None:
    (example,) = _blocks(ROOT / "docs" / "testbed.md", "toml")
    assert [device.cores for device in Description.parse(example).devices] == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_picture_is_well_formed_self_contained_and_described(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()  # our own file
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    assert root.findtext(f"{namespace}title")
    assert root.findtext(f"{namespace}desc")
    assert not re.search(r"(href|src)=\"(?!#)", picture.read_text(encoding="utf-8"))


def test_the_table_of_gpus_is_made_from_the_reports() -> None:
    reports = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in ROOT.glob(gpus.REPORTS)}
    page = gpus.PAGE.read_text(encoding="utf-8")
    assert gpus.with_table(page, gpus.table(reports)) == page
    parts = {part.name: {"passed": part.name != "waits"} for part in PARTS}
    machine = {"devices": [{"name": "NVIDIA L4"}, {"name": "NVIDIA L4"}]}
    row = gpus.table({"gpu_l4_2026-01-01.json": {"machine": machine, "parts": parts}}).splitlines()[-1]
    assert "| 2 x NVIDIA L4 | passed | passed | passed | FAILED | passed |" in row
