"""Examples of pipelines, tables and mixed devices: each compares itself with the local run and prints what each rank
has."""

from __future__ import annotations

import re

import pytest

from tests.distributed.test_examples import run


def test_dlrm_holds_every_table_whole_on_one_rank() -> None:
    text = run(2, "dlrm.py")
    assert "parity on 2 ranks: losses and parameters equal to 1e-12" in text
    held = re.findall(r"holds tables of ([0-9, ]*) rows", text)
    assert len(held) == 2
    rows = [int(number) for own in held for number in own.split(", ")]
    assert sorted(rows) == [3, 40, 300, 2000, 7000, 7000, 12000, 20000]


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


def test_unlike_gpus_get_unlike_shares_of_everything() -> None:
    text = run(2, "mixed_gpus.py")
    fast, slow = "V100-SXM2-32GB:0, has", "P100-PCIe-16GB:1, has"
    assert text.count("parity of loss and every gradient: equal to 1e-09") == 3
    assert "rows of the batch, (10, 6): rank 0 of 2" in text
    assert f"{fast} layers 0 to 4, 5 heads, 159 columns" in text
    assert f"{slow} layers 0 to 4, 3 heads, 97 columns" in text
    assert f"{fast} layers 0 to 2, 8 heads" in text
    assert f"{slow} layers 3 to 4, 8 heads" in text
