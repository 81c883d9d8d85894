"""Step time of whale.split() relative to DTensor's parallelize_module: Llama, forward and backward, two ranks.

The torch side has Megatron's plan: q, k, v, gate and up by columns, o and down by rows; embedding and head are whole.
"""

from __future__ import annotations

import copy

from harness import HEAD, arguments, on_two_ranks, report, side_by_side, table
from models import batch, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import whale


def megatron(model):
    mesh = init_device_mesh("cpu", (2,))
    plan = {}
    for index in range(len(model.model.layers)):
        layer = f"model.layers.{index}"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{layer}.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, plan)


def main() -> None:
    options = arguments("whale.split() against parallelize_module")
    on_two_ranks()
    rows = []
    for width, target in ((256, 0.85), (1024, 0.95)):
        if options.only and options.only != str(width):
            continue
        model, whole = llama(width=width), batch(2, 64, words=64)
        plain = megatron(copy.deepcopy(model))
        whale.annotate(model, {"": whale.split()})
        parallel = whale.parallelize(model, whole, device="cpu")

        def whale_step(parallel=parallel, whole=whole) -> None:
            parallel.zero_grad()
            parallel.train_step(**whole)

        def torch_step(plain=plain, whole=whole) -> None:
            plain.zero_grad()
            plain(**whole).loss.backward()

        case = f"Llama, 4 layers, {width} wide, 2 x 64"
        rows.append(side_by_side(case, whale_step, torch_step, repeats=options.repeats, target=target).cells())
    report("tensor_parallel", options, table(HEAD, rows))


if __name__ == "__main__":
    main()
