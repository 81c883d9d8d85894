"""A mixture of experts of Hugging Face on two ranks: each has whole experts, or a part of every expert, compared with
replicas of all (PyTorch's DDP).

    python benchmarks/whole_experts.py

The steps of all sides alternate in the same processes. Attention and the router are replicated on each side. With whole
experts rows go to the ranks that have them and come back, in all-to-alls; with cut ones the rows of all ranks are
gathered, and the results are summed. Each token goes to one, two or four of eight experts. Bytes are those of the
collectives inside of a step, of both ranks together, without sums of gradients.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import in_turns, on_two_ranks, report, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import whale
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.predict.traffic import traffic

EXPERTS, HIDDEN, INNER, ROWS, LENGTH = 8, 256, 512, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description="whole experts on each rank, against cut ones")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    on_two_ranks()
    rows = [cells for top_k in (1, 2, 4) for cells in compared(top_k, options.repeats)]
    head = ("experts a token", "experts", "forward and backward", "DDP / this", "cut / this", "bytes sent")
    sizes = f"Mixtral of 2 layers, {EXPERTS} experts of {HIDDEN} x {INNER}, {ROWS} rows of {LENGTH} tokens, float32"
    report("whole_experts", options, f"{sizes}\n\n" + table(head, rows))
    dist.barrier()
    dist.destroy_process_group()


def compared(top_k: int, repeats: int) -> list[tuple[str, ...]]:
    """The rows of a table for a number of experts to which each token goes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mixtral", vocab_size=512, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=top_k,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(512, (ROWS, LENGTH), generator=torch.manual_seed(1))
    batch, half = {"input_ids": ids, "labels": ids}, ROWS // 2
    own = {name: x[half * dist.get_rank() :][:half] for name, x in batch.items()}
    plain = DistributedDataParallel(copy.deepcopy(model))

    def replicated() -> None:
        plain.zero_grad()
        plain(**own).loss.backward()

    sides: dict[str, Callable[[], object]] = {"on all ranks (DDP)": replicated}
    sent = {"on all ranks (DDP)": 0.0}
    for way in ("cut", "whole"):
        sides[way], sent[way] = step_of(copy.deepcopy(model), way, batch)
    seconds = in_turns(sides, repeats)
    found = []
    for name, taken in seconds.items():
        ratios = (
            statistics.median(a / b for a, b in zip(seconds[other], taken, strict=True))
            for other in ("on all ranks (DDP)", "cut")
        )
        middle = f"{statistics.median(taken) * 1e3:.1f} ms"
        found.append((str(top_k), name, middle, *(f"{ratio:.2f}" for ratio in ratios), f"{sent[name] / 2**20:.2f} MiB"))
    return found


def step_of(model: nn.Module, way: str, batch: dict[str, torch.Tensor]) -> tuple[Callable[[], object], float]:
    """A step, and the bytes that both ranks send inside of it."""
    layout = {"": whale.replicate(), "model.layers.*.mlp.experts": whale.split(experts=way)}
    whale.annotate(model, layout)
    compilation = compile_model(model, batch, whale.Cluster.homogeneous(2), Options(), device="cpu", training=True)
    inside = sum(one.sent_bytes for one in traffic(compilation, 0) if one.purpose in ("forward", "backward"))
    parallel = whale.parallelize(model, batch, device="cpu")

    def step() -> None:
        parallel.zero_grad()
        parallel.train_step(**batch)

    return step, 2 * inside


if __name__ == "__main__":
    main()
