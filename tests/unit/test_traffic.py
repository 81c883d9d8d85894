"""Messages of a rank in a step, read off the compiled step, byte for byte."""

from __future__ import annotations

from typing import Any

import torch

import whale
from tests.distributed.zoo import trunk_and_head
from tests.small_models import decoder, tokens
from whale import replicate, split, stage
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.predict.traffic import Message, traffic

ROWS, LENGTH, WIDTH, DOUBLE = 8, 6, 16, 8


def compiled(
    model: torch.nn.Module, batch: Any, annotations: dict[str, Any], ranks: int, **options: Any
) -> Compilation:
    whale.annotate(model, annotations)
    cluster = Cluster.homogeneous(ranks)
    return compile_model(model.to("meta"), batch, cluster, Options(**options), device="cpu", training=True)


def test_data_parallelism_sums_every_gradient_once_and_says_nothing_else() -> None:
    model = decoder(layers=2)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    found = traffic(compiled(model, tokens(), {"": replicate()}, 4), 3)
    assert {(m.purpose, m.op, m.ranks) for m in found} == {("gradients", "all_reduce", (0, 1, 2, 3))}
    assert sum(m.count * m.tensor_bytes for m in found) == num_bytes
    assert sum(m.sent_bytes for m in found) == 1.5 * num_bytes


def test_a_stage_sends_the_hidden_state_of_each_micro_batch_and_gets_its_gradient() -> None:
    annotations = {"layers.0": stage(), "layers.1": stage()}
    compilation = compiled(decoder(layers=2), tokens(), annotations, 2, micro_batches=4)
    hidden = ROWS // 4 * LENGTH * WIDTH * DOUBLE
    sends = [Message(purpose="forward", op="send", ranks=(0, 1), tensor_bytes=hidden, count=4)]
    assert list(traffic(compilation, 0)) == sends
    assert list(traffic(compilation, 1)) == [
        Message(purpose="backward", op="send", ranks=(1, 0), tensor_bytes=hidden, count=4)
    ]


def test_a_split_classifier_exchanges_features_and_not_its_gradients() -> None:
    model, batch = trunk_and_head()
    trunk = sum(p.numel() for p in model.get_submodule("trunk").parameters()) * DOUBLE
    features = len(batch["x"]) * 24 * DOUBLE
    found = traffic(compiled(model, batch, {"": replicate(), "head": split()}, 2), 0)
    assert sum(m.tensor_bytes for m in found if m.purpose == "gradients") == trunk
    assert [(m.op, m.tensor_bytes) for m in found if m.tensor_bytes == features] == [
        ("all_gather", features),
        ("reduce_scatter", features),
    ]
