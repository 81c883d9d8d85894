"""Examples of pipelines, tables and mixed devices: each compares itself with the local run and prints what each rank
has."""

from __future__ import annotations

import re

import pytest

from tests.distributed.scripts import run_script
from tests.distributed.test_examples import EXAMPLES, run


def test_dlrm_holds_every_table_whole_on_one_rank() -> None:
    text = run(2, "dlrm.py")
    assert "parity on 2 ranks: losses and parameters equal to 1e-12" in text
    held = re.findall(r"holds tables of ([0-9, ]*) rows", text)
    assert len(held) == 2
    rows = [int(number) for own in held for number in own.split(", ")]
    assert sorted(rows) == [3, 40, 300, 2000, 7000, 7000, 12000, 20000]


def test_sparse_tables_are_placed_on_ranks_with_the_losses_of_one() -> None:
    def said(size: int, *arguments: str) -> dict[str, str]:
        return dict(re.findall(r"has (.*): (.*)", run(size, "sparse_tables.py", *arguments)))

    together, alone, on_host = said(2), said(1), said(2, "--host")
    assert len(together) == 2
    assert {*together.values()} == {*alone.values()} == {*on_host.values()}


def test_rows_that_are_looked_up_often_travel_once_with_the_losses_of_one() -> None:
    together, alone = run(3, "equal_rows.py"), run(1, "equal_rows.py")
    assert "distinct=0.6" in together
    losses = [re.findall(r"rank . of .: (.*)", text) for text in (together, alone)]
    assert len(losses[0]) == 3
    assert {*losses[0]} == {*losses[1]}


@pytest.mark.parametrize(
    ("size", "arguments", "layers"),
    [(2, (), [[0, 1], [2, 3]]), (4, ("--layers", "3"), [[0], [1, 2], [0], [1, 2]])],
    ids=["two stages", "two pipelines"],
)
def test_bert_is_a_pipeline_beside_its_replicas(size: int, arguments: tuple[str, ...], layers: list[list[int]]) -> None:
    text = run(size, "bert_pipeline.py", *arguments)
    assert f"parity on {size} ranks, {size // 2} x 2 stages: losses equal to 1e-09" in text
    for rank, own in enumerate(layers):
        assert f"rank {rank} of {size} has layers {own}" in text


def test_bert_on_three_ranks_has_three_stages() -> None:
    assert "parity on 3 ranks, 1 x 3 stages: losses equal to 1e-09" in run(3, "bert_pipeline.py")


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("bert_pipeline.py", ("--stages", "2"), "3 ranks are no multiple of 2 stages"),
        ("mixed_gpus.py", (), "mixed_gpus.toml has 2 devices, but 3 ranks started: see --cluster"),
    ],
)
def test_ranks_that_an_example_has_no_use_for_are_refused_in_a_sentence(
    name: str, arguments: tuple[str, ...], says: str
) -> None:
    one_of_three = {"RANK": "0", "WORLD_SIZE": "3"}
    done = run_script(str(EXAMPLES / name), *arguments, environment=one_of_three)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_unlike_gpus_get_unlike_shares_of_everything() -> None:
    text = run(2, "mixed_gpus.py")
    fast, slow = "V100-SXM2-32GB:0, has", "P100-PCIe-16GB:1, has"
    assert text.count("parity of loss and every gradient: equal to 1e-09") == 3
    assert "rows of the batch, (10, 6): rank 0 of 2" in text
    assert f"{fast} layers 0 to 4, 5 heads, 159 columns" in text
    assert f"{slow} layers 0 to 4, 3 heads, 97 columns" in text
    assert f"{fast} layers 0 to 2, 8 heads" in text
    assert f"{slow} layers 3 to 4, 8 heads" in text
