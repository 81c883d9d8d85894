"""Precisions by name, and what a model's step is priced in."""

from __future__ import annotations

import pytest
import torch

import whale
from whale.cli.model_loader import load_model
from whale.compile.trace import precision_of
from whale.errors import UsageError
from whale.planner.cost.precision import PRECISIONS, precision_named


def test_float32_is_priced_as_torch_multiplies_it() -> None:
    model = torch.nn.Linear(2, 2)
    before = torch.get_float32_matmul_precision()
    try:
        assert precision_of(model) == "fp32"
        torch.set_float32_matmul_precision("high")
        assert precision_of(model) == "tf32"
        assert precision_of(model.to(torch.bfloat16)) == "bf16"
    finally:
        torch.set_float32_matmul_precision(before)


def test_tf32_has_the_tensors_of_float32() -> None:
    whole, tensor = precision_named("fp32"), precision_named("tf32")
    assert (whole.element_bytes, whole.mixed) == (tensor.element_bytes, tensor.mixed)
    assert precision_named("tfloat32") is tensor


def test_an_unknown_precision_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=", ".join(PRECISIONS)):
        precision_named("fp7")


def test_the_example_of_experts_computes_what_autocast_does() -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "seq": 6, "vocab": 24, "experts": 4}
    loaded = load_model("examples/models/moe.py:moe", sizes | {"batch_size": 4}, device="cpu")
    model, batch = loaded.model.float(), loaded.batch
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch)
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    parallel = whale.parallelize(model, batch, device="cpu", precision="bf16")
    assert parallel.train_step(**batch).item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in parallel.full_gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-2, atol=1e-5)
