"""A batch on the host: each rank copies the parts that it reads to its device, once a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whale.runtime import uploads
from whale.runtime.uploads import OnHost, upload

CPU = torch.device("cpu")


def test_parts_alone_are_copied_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []

    def note(x: Tensor, device: torch.device) -> Tensor:
        copied.append(x)
        return upload(x, device)

    monkeypatch.setattr(uploads, "upload", note)
    whole = torch.arange(48).view(8, 6)
    held, rows = OnHost(whole, CPU), (((2, 4), (7, 8)), ((0, 6),))
    assert torch.equal(held.part(rows), whole[[2, 3, 7]])
    assert held.part(rows) is held.part(rows)
    assert torch.equal(held.part((((0, 1),), ((3, 6),))), whole[:1, 3:])
    assert [tuple(x.shape) for x in copied] == [(3, 6), (1, 3)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_scripts_may_write_to_a_tensor_that_is_being_copied_to_a_gpu() -> None:
    torch.cuda._sleep(10**8)
    x = torch.zeros(2**20)
    there = upload(x, torch.device("cuda", 0))
    x.fill_(1)
    assert float(there.sum()) == 0.0
