"""What the documents promise: links lead somewhere, and the README's commands are where the checks find them."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from whale import Cluster, errors
from whale.ir.cluster import DeviceType

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _prose(document: Path) -> str:
    """The document without its code blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", _prose(document)):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


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


def test_cluster_file_of_the_guide_is_read(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "cluster-files.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```$", guide, flags=re.MULTILINE | re.DOTALL)
    file = tmp_path / "cluster.toml"
    file.write_text(example, encoding="utf-8")
    known = DeviceType.of("A100-SXM4-80GB", speed={"float32": 19.5e12}, memory_bytes=80 * 2**30, memory_bandwidth=2e12)
    cluster = Cluster.load(file, catalog={known.name: known})
    assert [len(node.ranks) for node in cluster.nodes] == [8, 8, 4]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_picture_is_well_formed_self_contained_and_described(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()  # our own file
    namespace = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{namespace}svg"
    assert root.findtext(f"{namespace}title")
    assert root.findtext(f"{namespace}desc")
    assert not re.search(r"(href|src)=\"(?!#)", picture.read_text(encoding="utf-8"))
