"""A mixture of experts: each token goes to the ``top_k`` of ``experts`` feed-forwards that a router gives most weight.

    whale verify --model examples/models/moe.py:moe --set layers=2 --set hidden=64 --set heads=4 --set seq=16

Attention, norms and embeddings are Llama's; the defaults are those of Mixtral 8x7B: build that on the meta device.
The experts are grouped matrix products: no token is dropped, and every matrix is read once.
"""

import torch
from llama import Llama, batch_of
from torch import Tensor, nn
from torch.nn import functional as F


def groups(x, ends):
    return x.tensor_split(ends[:-1].long().cpu())


@torch.library.custom_op("examples::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows up to each end times the matrix of that place; `F.grouped_mm` for all dtypes, not only bfloat16."""
    if x.dtype == torch.bfloat16:
        return F.grouped_mm(x, matrices, offs=ends)
    return torch.cat([rows @ matrix for rows, matrix in zip(groups(x, ends), matrices, strict=True)])


@torch.library.custom_op("examples::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """For each matrix of `grouped_mm` the gradient, from its rows and those of the result's gradient."""
    return torch.stack([a.T @ b for a, b in zip(groups(x, ends), groups(y, ends), strict=True)])


grouped_mm.register_fake(lambda x, matrices, ends: x.new_empty(len(x), matrices.shape[-1]))
grouped_outer.register_fake(lambda x, y, ends: x.new_empty(len(ends), x.shape[1], y.shape[1]))


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad):
    x, matrices, ends = ctx.saved_tensors
    return (
        grouped_mm(grad.contiguous(), matrices.transpose(1, 2), ends),
        grouped_outer(x, grad.contiguous(), ends),
        None,
    )


grouped_mm.register_autograd(backward, setup_context=keep)


class Experts(nn.Module):
    """A router, and feed-forwards as stacked matrices: with a gate (SwiGLU), or of two matrices (GELU)."""

    def __init__(self, hidden, ffn, experts, top_k, gated):
        super().__init__()
        self.experts, self.top_k, self.gated = experts, top_k, gated
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, hidden, 2 * ffn if gated else ffn) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, ffn, hidden) * ffn**-0.5)

    def forward(self, x):
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        ordered, order = chosen.flatten().sort()  # the tokens' choices, expert by expert
        ends = torch.histc(ordered.float(), self.experts, min=0, max=self.experts - 1).cumsum(0, dtype=torch.int32)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = grouped_mm(tokens[order // self.top_k].to(dtype), self.up.to(dtype), ends)
        if self.gated:
            gate, y = y.chunk(2, dim=-1)
            y = F.silu(gate) * y
        else:
            y = F.gelu(y)
        y = grouped_mm(y.to(dtype), self.down.to(dtype), ends) * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return y[back].view(-1, self.top_k, x.shape[-1]).sum(1).view_as(x)


def moe(
    layers=32,
    hidden=4096,
    ffn=None,
    heads=32,
    kv_heads=None,
    experts=8,
    top_k=2,
    seq=4096,
    vocab=32000,
    mlp="swiglu",
    batch_size=1,
):
    """The model and a batch of random tokens; ``mlp`` is ``swiglu`` or ``gelu``.

    ``ffn`` is 3.5 times ``hidden`` and ``kv_heads`` a quarter of ``heads`` unless given.
    """
    ffn, kv_heads = ffn or 7 * hidden // 2, kv_heads or max(heads // 4, 1)

    def feed_forward():
        return Experts(hidden, ffn, experts, top_k, gated=mlp == "swiglu")

    model = Llama(layers, hidden, heads, kv_heads, vocab, 1000000.0, feed_forward)
    return model, batch_of(batch_size, seq, vocab)
