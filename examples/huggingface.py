"""Train an architecture of Hugging Face in parallel: unmodified, made from its configuration with random weights, and
annotated by the paths of its modules.

    torchrun --standalone --nproc-per-node 2 examples/huggingface.py
    torchrun --standalone --nproc-per-node 2 examples/huggingface.py --model qwen3 --layout tp
    torchrun --standalone --nproc-per-node 4 examples/huggingface.py --model bert --layout pp_dp --micro-batches 4
    torchrun --standalone --nproc-per-node 2 examples/huggingface.py --model vit --set num_hidden_layers=4
    python examples/huggingface.py --model mixtral                     # alone; the same losses

Needs `pip install transformers`; nothing is downloaded. A local copy is trained beside the parallel model, and the
losses must be the same.
"""

import argparse
import copy
import json

import torch
import transformers
from torch import nn

import whale

# A small model of most architectures. Each configuration takes the values that it knows.
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 256, "num_local_experts": 4, "num_labels": 10,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip

HEADS = (
    transformers.AutoModelForCausalLM,
    transformers.AutoModelForMaskedLM,
    transformers.AutoModelForSeq2SeqLM,
    transformers.AutoModelForImageClassification,
)


def build(model_type, settings):
    """The architecture with its first head; in evaluation mode, so without dropout."""
    default = transformers.AutoConfig.for_model(model_type)
    known = {*default.to_dict(), *default.attribute_map, "num_labels", "decoder_start_token_id"}
    sizes = {name: value for name, value in SMALL.items() if name in known}
    config = transformers.AutoConfig.for_model(model_type, **sizes | settings)
    for head in HEADS:
        if type(config) in head._model_mapping:
            return head.from_config(config).eval()
    raise SystemExit(f"{model_type} has no head with a loss of its own")


def make_batch(model, rows, length):
    """Tokens or images, whichever the model takes first."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 64)
        images = torch.randn(rows, config.num_channels, size, size)
        return {"pixel_values": images, "labels": torch.randint(config.num_labels, (rows,))}
    tokens = torch.randint(config.get_text_config().vocab_size, (rows, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def annotations(model, layout):
    """Paths to strategies. The layers are the list of modules with most parameters, whatever its path."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    layers = max(lists, key=lambda name: sum(p.numel() for p in model.get_submodule(name).parameters()))
    count = len(model.get_submodule(layers))
    first, second = f"{layers}.[0-{count // 2 - 1}]", f"{layers}.[{count // 2}-{count - 1}]"
    return {
        "dp": {"": whale.replicate()},  # every rank has the model and a part of the batch
        "tp": {"": whale.split()},  # every rank has a part of each matrix
        "hybrid": {"": whale.replicate(), f"{layers}.*": whale.split()},  # layers cut, the rest by rows, on all ranks
        "pp": {first: whale.stage(), second: whale.stage()},  # every rank has half of the layers
        "dp_tp": {"": [whale.replicate(2), whale.split()]},  # shards inside replicas
        "pp_dp": {first: [whale.stage(2), whale.replicate()], second: [whale.stage(2), whale.replicate()]},
        "pp_tp": {first: [whale.stage(2), whale.split()], second: [whale.stage(2), whale.split()]},
    }[layout]


def setting(text):
    name, _, value = text.partition("=")
    return name, json.loads(value)


parser = argparse.ArgumentParser(description="An architecture of Hugging Face in parallel")
parser.add_argument("--model", default="llama", help="a model type of transformers, such as gpt2, bert, vit, mixtral")
parser.add_argument("--set", type=setting, action="append", default=[], help="a value of its configuration: NAME=JSON")
parser.add_argument("--layout", default="dp", choices=["dp", "tp", "hybrid", "pp", "dp_tp", "pp_dp", "pp_tp"])
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--rows", type=int, default=8, help="of the global batch")
parser.add_argument("--length", type=int, default=32, help="of a sequence, in tokens")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()

torch.manual_seed(0)
model = build(options.model, dict(options.set))
batch = make_batch(model, options.rows, options.length)
local = copy.deepcopy(model)

whale.annotate(model, annotations(model, options.layout))
model = whale.parallelize(model, batch, micro_batches=options.micro_batches)

optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (model, local)]
equal = True
for step in range(options.steps):
    loss, alone = model.train_step(**batch), local(**batch).loss
    alone.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    equal &= abs(loss.item() - alone.item()) <= 1e-5 * alone.item()  # float32: Hugging Face's norms know no other
    if model.rank == 0:
        print(f"step {step}: loss {loss.item():.6f}, alone {alone.item():.6f}")

held, whole = (sum(p.numel() for p in trained.parameters()) for trained in (model, local))
print(f"rank {model.rank} of {model.world_size} holds {held:,} of {whole:,} parameters")
if model.rank == 0:
    print(f"parity on {model.world_size} ranks: losses {'equal' if equal else 'NOT EQUAL'} to 1e-5")
raise SystemExit(0 if equal else 1)
