"""Train an unmodified GPT-2 of Hugging Face in parallel: a layout is a few lines, model and loop stay the same.

Usage, with `pip install -e '.[test]'` for transformers:

    torchrun --nproc-per-node 2 examples/gpt2.py --layout dp
    torchrun --nproc-per-node 2 examples/gpt2.py --layout tp
    torchrun --nproc-per-node 2 examples/gpt2.py --layout pp --micro-batches 4
    torchrun --nproc-per-node 4 examples/gpt2.py --layout dp_tp
    torchrun --nproc-per-node 4 examples/gpt2.py --layout pp_dp --micro-batches 4 --layers 4
    python examples/gpt2.py                                           # alone; the same losses

Every layout prints the same losses, up to the rounding of float32.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import whale


def layout_of(name, num_layers):
    """The annotations of a layout: module paths to strategies."""
    half = num_layers // 2
    first, second = f"transformer.h.[0-{half - 1}]", f"transformer.h.[{half}-{num_layers - 1}]"
    return {
        "none": {},
        "dp": {"": whale.replicate()},  # every rank has the model and a part of the batch
        "tp": {"": whale.split()},  # every rank has a part of each matrix
        "pp": {first: whale.stage(), second: whale.stage()},  # every rank has half of the layers
        "dp_tp": {"": [whale.replicate(2), whale.split()]},  # shards inside replicas
        "pp_dp": {first: [whale.stage(2), whale.replicate()], second: [whale.stage(2), whale.replicate()]},
        "pp_tp": {first: [whale.stage(2), whale.split()], second: [whale.stage(2), whale.split()]},
    }[name]


def make_batches(steps, rows, length, vocabulary):
    """Sequences that count upwards from a random start: something that a small model can learn."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(vocabulary, (rows, 1), generator=generator)
        ids = (start + torch.arange(length)) % vocabulary
        yield {"input_ids": ids, "labels": ids}


parser = argparse.ArgumentParser(description="GPT-2 in parallel")
parser.add_argument("--layout", default="none", choices=["none", "dp", "tp", "pp", "dp_tp", "pp_dp", "pp_tp"])
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=128)
parser.add_argument("--rows", type=int, default=8, help="of the global batch")
parser.add_argument("--length", type=int, default=32, help="of a sequence")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "zero_bubble"])
options = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(
    n_layer=options.layers,
    n_embd=options.hidden,
    n_head=options.heads,
    n_positions=options.length,
    vocab_size=options.vocabulary,
    resid_pdrop=0.0,  # without dropout, so that all layouts give the same losses
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config)
batches = list(make_batches(options.steps, options.rows, options.length, options.vocabulary))

if options.layout != "none":
    whale.annotate(model, layout_of(options.layout, options.layers))
model = whale.parallelize(model, batches[0], micro_batches=options.micro_batches, schedule=options.schedule)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step, batch in enumerate(batches):
    loss = model.train_step(**batch)
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if model.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

held = sum(p.numel() for p in model.parameters())
print(f"rank {model.rank} of {model.world_size} holds {held} parameters")
