"""Writes of files: whole or not at all, through links, and into devices and pipes without replacing them."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_explain import pipeline
from whale.cli.files import refuse_same, refuse_unwritable, write_whole
from whale.cli.simulate import write_trace
from whale.errors import UsageError
from whale.ir.files import check_writable, write_file
from whale.ir.plan import Plan
from whale.planner.simulation.simulate import simulate


def test_the_target_of_a_link_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "plan.json", tmp_path / "link.json"
    link.symlink_to(Path("folder", "plan.json"))
    for text in ("first", "second"):  # the target is missing, then there
        refuse_unwritable(link)
        write_whole(link, text)
        assert link.is_symlink() and target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["plan.json"]


def test_a_link_into_a_missing_folder_and_a_loop_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lost").symlink_to(tmp_path / "none" / "plan.json")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("lost", "loop"):
        for act in (refuse_unwritable, lambda path: write_whole(path, "text")):
            with pytest.raises(UsageError, match=f"-o .*{name} cannot be written"):
                act(tmp_path / name)
        assert (tmp_path / name).is_symlink()


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    check_writable(pipe)  # without opening it, which would wait for a reader
    reader.start()
    write_file(pipe, ("a ", "plan"))
    reader.join(10)
    assert read == ["a plan"] and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        device.write_text("a text")
    except OSError:
        pytest.skip("this user makes no devices")
    refuse_unwritable(device)
    Plan(world_size=1).save(device)
    write_trace(simulate(pipeline(1.0, 3.0)), device)
    write_whole(device, "text")
    assert stat.S_ISCHR(device.stat().st_mode)


def test_a_file_keeps_its_permissions_and_what_it_held_where_a_piece_fails(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")
    file.chmod(0o640)

    def failing() -> Iterator[str]:
        yield "new"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_file(file, failing())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]
    write_file(file, ("new",))
    assert file.read_text() == "new" and stat.S_IMODE(file.stat().st_mode) == 0o640


def test_one_file_is_not_written_twice_nor_in_place_of_what_is_read(tmp_path: Path) -> None:
    file, link = tmp_path / "plan.json", tmp_path / "link.json"
    link.symlink_to(file)
    with pytest.raises(UsageError, match=r"-o .*plan.json and --trace .*link.json are the same file"):
        refuse_same({"-o": file, "--trace": link})
    with pytest.raises(UsageError, match=r"the file of FILE would be lost"):
        refuse_same({"-o": file}, {"FILE": str(file)})
    refuse_same({"-o": file, "--trace": None}, {"FILE": tmp_path / "other.json", "--cluster": "plan.json"})
    refuse_same({"-o": file}, {"FILE": link.with_name("a"), "--profile": link.with_name("a")})  # read twice
    refuse_same({"-o": Path(os.devnull), "--record": Path(os.devnull)})
