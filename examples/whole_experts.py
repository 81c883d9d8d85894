"""A Hugging Face mixture of experts: attention in data parallel, and on each rank whole experts, or parts of all.

    torchrun --standalone --nproc-per-node 2 examples/whole_experts.py
    torchrun --standalone --nproc-per-node 3 examples/whole_experts.py --model qwen3_moe     # 3, 3 and 2 of 8 experts
    torchrun --standalone --nproc-per-node 4 examples/whole_experts.py --model olmoe --experts 6

Any mixture of transformers whose experts are stacked matrices will do. Tokens go to the ranks of the experts that they
chose and come back; none is dropped, so the loss is that of one process, whatever the router does.
"""

import argparse
import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import whale

parser = argparse.ArgumentParser(description="expert parallelism of a Hugging Face model")
parser.add_argument("--model", default="mixtral", help="a model type of transformers")
parser.add_argument("--experts", type=int, default=8)
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()
counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), options.experts)
config = AutoConfig.for_model(
    options.model, vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts_per_tok=2, pad_token_id=0, **counts,
)  # fmt: skip
torch.manual_seed(0)
local = AutoModelForCausalLM.from_config(config)
ids = torch.randint(128, (8, 16), generator=torch.manual_seed(1))
batch = {"input_ids": ids, "labels": ids}
expected, trained = [], copy.deepcopy(local)
optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
for _ in range(options.steps):
    loss = trained(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    expected.append(loss.item())
for way in ("whole", "cut"):
    model = copy.deepcopy(local)
    whale.annotate(model, {"": whale.replicate(), "model.layers.*.mlp.experts": whale.split(experts=way)})
    model = whale.parallelize(model, batch, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(options.steps):
        found.append(model.train_step(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    shape = tuple(model.get_parameter("model.layers.0.mlp.experts.down_proj").shape)
    print(f"experts {way}: rank {model.rank} of {model.world_size} has {shape}")
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    if model.rank == 0:
        print(f"experts {way}: loss {found[-1]:.6f}, alone {expected[-1]:.6f}, apart by at most {worst:.1e}")
    assert worst < 1e-4
