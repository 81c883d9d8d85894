"""Parts of graphs that compute at the host: on a GPU tables are not on it, and steps are the local model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale

ON_GPU = pytest.mark.gpu
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Clicks(nn.Module):
    """Tables, of which one skips a padding index, and a dense part."""

    def __init__(self, rows: int = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(rows, 64, mode="sum", sparse=True),
                nn.EmbeddingBag(rows, 64, mode="mean", sparse=True, padding_idx=2),
            ]
        )
        self.dense = nn.Sequential(nn.Linear(128, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        found = self.dense(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1))
        return nn.functional.mse_loss(found.squeeze(1), clicked)


def batch(rows: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(50, (rows, 2, 4), generator=generator),
        "clicked": torch.rand(rows, generator=generator).double(),
    }


def trained(model: Any, step: Any, given: dict[str, Tensor]) -> list[float]:
    tables = [p for name, p in model.named_parameters() if name.startswith("tables")]
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    optimizers = [whale.optim.RowWiseAdagrad(tables, lr=0.1), torch.optim.SGD(dense, lr=0.1)]
    losses = []
    for _ in range(4):
        losses.append(step(**given).item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def compared(device: str, given: dict[str, Tensor], **options: Any) -> Any:
    """A model with tables at the host that has trained as the local one has."""
    local = Clicks().double()
    made: Any = whale.parallelize(copy.deepcopy(local), batch(), device=device, offload="tables", **options)

    def step(**own: Tensor) -> Tensor:
        loss: Tensor = local(**own)
        loss.backward()
        return loss.detach()

    on_host = {name: x.cpu() for name, x in given.items()}
    torch.testing.assert_close(trained(made, made.train_step, given), trained(local, step, on_host), rtol=0, atol=1e-10)
    for name, whole in made.full_state_dict().items():
        torch.testing.assert_close(whole.cpu(), local.state_dict()[name], rtol=0, atol=1e-10)
    return made


def test_one_rank_has_its_tables_at_the_host() -> None:
    compared("cpu", batch(), micro_batches=3)


@ON_GPU
@NEEDS_GPU
@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}, {"cuda_graphs": True}, {"compile": True}], ids=str)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:CUDA graphs leave out")
def test_a_gpu_trains_with_tables_at_its_host(place: str, options: dict[str, Any]) -> None:
    """Whether the batch is on the host or on the GPU."""
    made = compared("cuda", {name: x.to(place) for name, x in batch().items()}, **options)
    for name, parameter in made.named_parameters():
        assert parameter.is_cuda != name.startswith("tables")


@ON_GPU
@NEEDS_GPU
def test_a_gpu_has_no_memory_of_tables_on_the_host() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = Clicks(2**20)  # two tables of 256 MiB
    made: Any = whale.parallelize(model, batch(), device="cuda", offload="tables")
    given = {name: x.float() if x.is_floating_point() else x for name, x in batch().items()}
    trained(made, made.train_step, given)
    assert torch.cuda.max_memory_allocated() - before < 2**26
    assert made.full_state_dict()["tables.0.weight"].device.type == "cpu"
