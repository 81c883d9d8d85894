"""Rows of a causal attention that are not the first ones: computed by the kernels without a mask, exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import whale
from tests.distributed import spatial, zoo
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.ir.cluster import Cluster
from whale.ir.placement import unit_ranges
from whale.runtime.attention import CausalRows, _has_flash, has_kernel
from whale.strategies.kernels import trace

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

HELD = {
    "stretches": unit_ranges((7, 2, 1), False),
    "from both ends": unit_ranges((4, 4, 3), True),
    "a rank without rows": unit_ranges((3, 4, 0), True),
}


def gathered(example: tuple[nn.Module, Any], size: int = 3) -> Compilation:
    model, batch = example
    whale.annotate(model, {"": whale.split(dim=1, attention="gather")})
    return compile_model(model, batch, Cluster.homogeneous(size), Options(), device="cpu", training=True)


def operators(compilation: Compilation, rank: int) -> list[tuple[Any, dict[str, Any]]]:
    """The attentions of a rank's program, each with its arguments."""
    code = compilation.local_programs(compilation.stages[0], rank, None)[0].micro_batch.code
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    found: list[tuple[Any, dict[str, Any]]] = []
    for node in code.graph.nodes:
        if node.target is ATTENTION:
            found.append((ATTENTION, dict(zip(names, node.args, strict=False)) | dict(node.kwargs)))
        elif node.op == "call_module" and isinstance(called := code.root.get_submodule(str(node.target)), CausalRows):
            found.append((called, {}))
    return found


@pytest.mark.parametrize("build", [spatial.gpt, zoo.llama])
def test_no_rank_makes_a_mask(build: Any) -> None:
    compilation = gathered(build())
    stage, seen = compilation.stages[0], set()
    for rank in stage.mesh.ranks:
        graphs = compilation.local_programs(stage, rank, None)[0]
        assert not [n for n in graphs.micro_batch.code.graph.nodes if "mask" in n.name]
        attentions = operators(compilation, rank)
        assert len(attentions) == 2
        for called, given in attentions:
            seen.add(called is ATTENTION)
            assert called is not ATTENTION or (given["is_causal"] and not isinstance(given.get("attn_mask"), fx.Node))
    assert False in seen


def test_attention_that_drops_weights_has_one_kernel_for_all_rows() -> None:
    model, batch = zoo.gpt2_one_layer_with_dropout()
    found = [given for rank in range(3) for _, given in operators(gathered((model.train(), batch)), rank)]
    assert any(isinstance(given.get("attn_mask"), fx.Node) for given in found)


@pytest.mark.parametrize("held", HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 0.1)])
def test_rows_are_those_of_the_whole(held: Any, groups: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    length = sum(stop - start for own in held for start, stop in own)
    given = [torch.randn(2, heads, length, 8).to(dtype) for heads in (4, groups, groups)]
    leaves = [x.double().clone().requires_grad_() for x in given]
    whole = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True, enable_gqa=True)
    grad = torch.randn_like(whole).to(dtype)
    whole.backward(grad.double())
    sums = [torch.zeros_like(x) for x in leaves]
    for own in held:
        places = [i for start, stop in own for i in range(start, stop)]
        if not places:
            continue
        query, key, value = (x[..., at, :] for x, at in zip(given, (places, *[range(own[-1][1])] * 2), strict=True))
        local = [x.clone().requires_grad_() for x in (query, key, value)]
        result = CausalRows(own, None)(*local)
        assert result.dtype == dtype
        assert torch.allclose(result.double(), whole[..., places, :], atol=bound, rtol=0)
        result.backward(grad[..., places, :])
        for total, x, at in zip(sums, local, (places, *[range(own[-1][1])] * 2), strict=True):
            assert x.grad is not None
            total[..., list(at), :] += x.grad.double()
    for total, x in zip(sums, leaves, strict=True):
        assert x.grad is not None
        assert torch.allclose(total, x.grad, atol=bound, rtol=0)


def test_a_batch_without_rows_has_gradients_of_zeros() -> None:
    given = [torch.ones(0, 2, 3, 4, requires_grad=True) for _ in range(3)]
    result = CausalRows(((0, 1), (1, 3)), None)(*given)
    assert result.shape == (0, 2, 3, 4)
    result.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in given)


def test_blocks_of_scores_are_counted_as_attention() -> None:
    compilation = gathered(spatial.gpt(), size=2)
    stage = compilation.stages[0]
    program = compilation.local_programs(stage, 0, None)[0]
    found = trace(compilation.captured, stage, program, 0, torch.float64)
    forward, backward = ([k for k in kernels if k.kind == "attention"] for kernels in (found.forward, found.backward))
    # Rows 0 to 2 and 8 to 10 of 11: two squares, of which half counts, and all columns before the second.
    assert [(k.dims[1:3], k.causal) for k in forward[:3]] == [((3, 3), True), ((3, 8), False), ((3, 3), True)]
    assert sum(k.flops for k in backward) * 2 == sum(k.flops for k in forward) * 5


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch for CUDA asks a driver for its devices, and there is none",
)
@pytest.mark.parametrize(("capability", "found"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_before_ampere_have_no_flash_attention(
    capability: tuple[int, int], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with torch._subclasses.FakeTensorMode():
        query = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="cuda")
        assert has_kernel(query, query) is found
        assert not has_kernel(query.float(), query.float())
    _has_flash.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_on_a_gpu_are_those_on_a_processor() -> None:
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, heads, size, 64) for heads, size in ((4, 24), (2, 96), (2, 96), (4, 24)))
    rows = CausalRows(((16, 28), (84, 96)), None)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        x = [each.to(torch.bfloat16).to(device, dtype).requires_grad_() for each in (query, key, value)]
        result = rows(*x)
        result.backward(grad.to(device, dtype))
        return [result.detach(), *(each.grad for each in x if each.grad is not None)]

    for one, other in zip(run("cuda", torch.bfloat16), run("cpu", torch.float64), strict=True):
        assert torch.allclose(one.cpu().double(), other, atol=0.1)
