"""BERT as a pipeline of stages, in data parallel over the remaining ranks.

The model is Hugging Face's, unmodified, with random weights. Each stage has some of its layers; the embeddings join the
first and the head, whose weights are the embeddings', the last: their gradients are summed over both.

    torchrun --standalone --nproc-per-node 2 examples/bert_pipeline.py                  # two stages
    torchrun --standalone --nproc-per-node 4 examples/bert_pipeline.py                  # two pipelines of two stages
    torchrun --standalone --nproc-per-node 3 examples/bert_pipeline.py                  # three stages
    torchrun --standalone --nproc-per-node 4 examples/bert_pipeline.py --stages 4
    python examples/bert_pipeline.py                                                    # alone; the same losses

It needs transformers: `pip install -e '.[test]'`.
"""

import argparse
import copy
import os

import torch
from transformers import BertConfig, BertForMaskedLM

import whale

WORDS, LENGTH, ROWS, BOUND = 128, 16, 16, 1e-9
RANKS = int(os.environ.get("WORLD_SIZE", 1))


def build(layers):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,  # without dropout, so that the losses can be compared
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).double()


def batches(steps):
    """Sequences that count upwards; one word in four is masked and to be predicted."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = (torch.randint(WORDS, (ROWS, 1), generator=generator) + torch.arange(LENGTH)) % WORDS
        masked = torch.rand(ROWS, LENGTH, generator=generator) < 0.25
        yield {"input_ids": tokens.masked_fill(masked, 0), "labels": tokens.masked_fill(~masked, -100)}


def stages(layers, count):
    """The annotations: a key with a range of layers is one stage."""
    starts = [layers * stage // count for stage in range(count + 1)]
    return {f"bert.encoder.layer.[{starts[s]}-{starts[s + 1] - 1}]": whale.stage() for s in range(count)}


def losses(model, step):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(steps=6):
        loss = step(batch)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


parser = argparse.ArgumentParser(description="BERT in a pipeline")
usual = next((count for count in (2, 3, 1) if RANKS % count == 0), 1)
parser.add_argument("--stages", type=int, default=usual, choices=[1, 2, 3, 4])
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--micro-batches", type=int, default=4)
parser.add_argument("--schedule", default="1f1b", choices=["gpipe", "1f1b", "zero_bubble"])
options = parser.parse_args()
if RANKS % options.stages:
    raise SystemExit(f"{RANKS} ranks are no multiple of {options.stages} stages; start another number of them")

model = build(options.layers)
local = copy.deepcopy(model)


def local_step(batch):
    loss = local(**batch).loss
    loss.backward()
    return loss


expected = list(losses(local, local_step))

whale.annotate(model, stages(options.layers, options.stages))
model = whale.parallelize(model, next(batches(steps=1)), micro_batches=options.micro_batches, schedule=options.schedule)
found = list(losses(model, lambda batch: model.train_step(**batch)))

error = max(abs(a - b) / a for a, b in zip(expected, found, strict=True))
held = sorted({int(name.split(".")[3]) for name, _ in model.named_parameters() if ".layer." in name})
print(f"rank {model.rank} of {model.world_size} has layers {held}")
if model.rank == 0:
    print(f"losses: {', '.join(f'{loss:.6f}' for loss in found)}")
    pipelines = f"{model.world_size // options.stages} x {options.stages} stages"
    equal = "equal" if error < BOUND else "NOT EQUAL"
    print(f"parity on {model.world_size} ranks, {pipelines}: losses {equal} to {BOUND:g}, off by {error:.1e} at most")
raise SystemExit(0 if error < BOUND else 1)
