"""The compared digests do not depend on the order in which a model happens to compute its tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale
from tests.solved import solve
from whale.graph.capture import capture
from whale.graph.ordering import settle_order


class Tables(nn.Module):
    """A model that makes tables and constants in the order of a set, which differs between processes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype)
        tables = {}
        for name in self.names:
            scale = torch.tensor([1.0, 2.0] if name == "slow" else [3.0, 4.0])
            tables[name] = torch.outer(places * scale.sum(), torch.ones(8)).cos()
        hidden = self.project(x * tables["slow"])
        return (hidden * tables["quick"]).square().sum()


def test_ranks_agree_on_a_model_that_goes_through_a_set() -> None:
    batch = (torch.zeros(4, 6, 8),)
    one, other = (
        solve(Tables(names), batch, {"": whale.split()}).compilation.texts()
        for names in (["slow", "quick"], ["quick", "slow"])
    )
    assert one == other


def test_a_settled_graph_computes_the_same() -> None:
    torch.manual_seed(0)
    model, x = Tables(["quick", "slow"]), torch.randn(4, 6, 8)
    captured = capture(model, (x,))
    settle_order(captured)
    given = {**dict(model.named_parameters()), "args[0]": x, **captured.constants}
    names = captured.parameters | captured.inputs | {name: name for name in captured.constants}
    found = captured.module(*[given[names[n.name]] for n in captured.graph.nodes if n.op == "placeholder"])[0]
    torch.testing.assert_close(found, model(x))
