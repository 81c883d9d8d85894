"""Fine-tune a Llama on text files with two different GPUs: data, evaluation, logs, checkpoints, the model at the end.

The script makes its text files and a tokenizer for them, trains with the Trainer of Hugging Face, resumes where an
earlier run ended, and writes a model that `from_pretrained` loads. The cluster file describes a V100 and a P100; the
script need not run on them: two processes on a laptop divide every batch as those two would.

    torchrun --standalone --nproc-per-node 2 examples/finetune_two_gpus.py
    torchrun --standalone --nproc-per-node 2 examples/finetune_two_gpus.py --stages      # layers, not rows, by speed
    python examples/finetune_two_gpus.py                                                 # alone, on one device
    torchrun ... examples/finetune_two_gpus.py --model a/folder --text a/folder/of/txt --cluster my.toml
"""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Bytes
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

import whale
from whale.integrations.transformers import Trainer

LENGTH = 32
HERE = Path(__file__).parent


def write_texts(folder):
    """Sentences with a rule that a model can learn, in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    animals, places = ["whale", "seal", "gull", "cod"], ["ice", "reef", "bay", "deep"]
    lines = [
        f"the {animal} swims to the {place} and the {other} follows the {animal} to the {place}."
        for animal in animals
        for other in animals
        for place in places
    ]
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "train.txt").write_text("\n".join(lines[i] for i in order[:-8]))
    (folder / "eval.txt").write_text("\n".join(lines[i] for i in order[-8:]))


def tokenizer_of(folder):
    """A tokenizer of pairs of bytes, learnt from the training text."""
    learnt = Tokenizer(BPE(unk_token="<unk>"))
    learnt.pre_tokenizer, learnt.decoder = ByteLevel(), Bytes()
    trainer = BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<end>"], show_progress=False)
    learnt.train([str(folder / "train.txt")], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=learnt, eos_token="<end>", unk_token="<unk>")


def blocks(tokenizer, file):
    """The text of a file as samples of LENGTH tokens; the labels of a causal model are its inputs."""
    tokens = [token for line in file.read_text().splitlines() for token in tokenizer.encode(line + tokenizer.eos_token)]
    rows = torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def shares_of_right_words(prediction):
    """A metric, from whole logits and labels."""
    right = prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


parser = argparse.ArgumentParser(description="fine-tune a Llama on two different GPUs")
parser.add_argument("--text", type=Path, help="folder with train.txt and eval.txt; by default some are written")
parser.add_argument("--model", help="folder or name of a causal model; by default a small Llama with random weights")
parser.add_argument("--cluster", default=HERE / "mixed_gpus.toml", help="the devices, in the order of the ranks")
parser.add_argument("--out", type=Path, default=Path("finetuned"))
parser.add_argument("--stages", action="store_true", help="divide the layers instead of the rows")
parser.add_argument("--batch", type=int, default=8, help="rows of all ranks together")
parser.add_argument("--steps", type=int, default=30)
options = parser.parse_args()

alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
text = options.text or options.out / "text"
if options.text is None:
    write_texts(text)  # every rank writes the same
tokenizer = AutoTokenizer.from_pretrained(options.model) if options.model else tokenizer_of(text)
train, evaluation = blocks(tokenizer, text / "train.txt"), blocks(tokenizer, text / "eval.txt")

torch.manual_seed(0)
if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model)
else:
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=4, **size))

# Whale: how the devices divide the model, and the parallel model.
layers = len(model.model.layers)
first = round(layers * 0.6)  # of the V100, which is 1.65 times as fast
halves = {f"model.layers.[0-{first - 1}]": whale.stage(), f"model.layers.[{first}-{layers - 1}]": whale.stage()}
whale.annotate(model, halves if options.stages and not alone else {"": whale.replicate()})
example = {name: torch.stack([row[name] for row in train[: options.batch]]) for name in train[0]}
model = whale.parallelize(
    model, example, cluster=None if alone else options.cluster, micro_batches=4 if options.stages else 1
)
print(
    f"rank {model.rank} has {sum(p.numel() for p in model.parameters())} elements, and computes {model.batch_share()}"
)

arguments = TrainingArguments(
    str(options.out),
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,  # of all ranks together
    per_device_eval_batch_size=options.batch,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=3,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=15,
    save_steps=15,
    report_to=["tensorboard"] if find_spec("tensorboard") else "none",  # tensorboard --logdir finetuned
    use_cpu=not torch.cuda.is_available(),
    dataloader_pin_memory=False,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=evaluation, compute_metrics=shares_of_right_words)
trainer.train(resume_from_checkpoint=any(options.out.glob("checkpoint-*")))
metrics = trainer.evaluate()
trainer.save_model(str(options.out / "model"))

if model.rank == 0:
    tokenizer.save_pretrained(options.out / "model")
    print(f"eval loss {metrics['eval_loss']:.4f}, accuracy {metrics['eval_accuracy']:.3f}")
    local = AutoModelForCausalLM.from_pretrained(options.out / "model")  # a plain model again, which can generate
    start = torch.tensor([tokenizer.encode("the whale swims to the reef and the")])
    print(tokenizer.decode(local.generate(start, max_new_tokens=6, do_sample=False, pad_token_id=1)[0]))
