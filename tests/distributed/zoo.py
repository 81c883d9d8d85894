"""Small models in float64 with a batch each: real ones of Hugging Face with random weights, and hand-made odd ones.

Each builder draws from torch's generator, so that a seed before it gives the same model and batch everywhere.
Transformers is imported where it is used: ranks that do not need it start faster.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = 4
VOCABULARY = 103
Example = tuple[nn.Module, dict[str, Any]]


def tokens(rows: int = ROWS, length: int = 8) -> dict[str, Tensor]:
    """Token ids, and labels of which each row ignores another number, one row all."""
    ids = torch.randint(5, 95, (rows, length))
    labels = ids.clone()
    for row in range(rows):
        labels[row, length - (3 * row) % (length + 1) :] = -100
    labels[rows - 1] = -100
    return {"input_ids": ids, "labels": labels}


def few_heads(rows: int = ROWS) -> Example:
    """A decoder of which one attention has one head, and another one four."""
    from tests.small_models import Block, Decoder

    model = Decoder(layers=0)
    model.layers.extend([Block(16, 1), Block(16, 4)])
    drawn = torch.randint(32, (2, rows, 6))
    return model.double(), {"tokens": drawn[0], "labels": drawn[1]}


class Contrastive(nn.Module):
    """The loss of SimCLR, which takes the other rows' similarities by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.normalize(self.body(x), dim=1)
        others = ~torch.eye(len(rows), dtype=torch.bool, device=x.device)
        logits = (rows @ rows.T)[others].view(len(rows), -1) / 0.5
        return nn.functional.cross_entropy(logits, torch.arange(len(rows), device=x.device) // 2)


def contrastive(rows: int = ROWS) -> Example:
    return Contrastive().double(), {"x": torch.randn(rows, 6).double()}


def padded(rows: int = ROWS, length: int = 8) -> dict[str, Tensor]:
    """Token ids with an attention mask that leaves out the end of some rows."""
    batch = tokens(rows, length)
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, length - row % 4 :] = 0
    return {**batch, "attention_mask": mask}


def images(rows: int = ROWS, size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, size, size).double(), "labels": torch.randint(0, 10, (rows,))}


def gpt2(
    attention: str = "sdpa", dropout: float = 0.0, layers: int = 2, rows: int = ROWS, tied: bool = True
) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=16, attn_implementation=attention,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, tie_word_embeddings=tied,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double(), tokens(rows)


def gpt2_eager() -> Example:
    return gpt2("eager")


def gpt2_padded() -> Example:
    return gpt2()[0], padded()


def gpt2_untied() -> Example:
    return gpt2(tied=False)


def gpt2_one_layer() -> Example:
    return gpt2(layers=1)


def gpt2_eager_one_layer() -> Example:
    return gpt2("eager", layers=1)


def gpt2_four_layers() -> Example:
    return gpt2(layers=4)


def gpt2_with_dropout() -> Example:
    return gpt2(dropout=0.2)


def gpt2_one_layer_with_dropout() -> Example:
    return gpt2(layers=1, dropout=0.2)


def gpt2_checkpointed() -> Example:
    model, batch = gpt2()
    enable: Any = model.gradient_checkpointing_enable
    enable()
    return model, batch


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).double(), tokens()


def _decoder(kind: str, rows: int = ROWS, **options: Any) -> Example:
    """A small decoder of another family, whose four heads share two keys."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **sizes, **heads, **special, **options)
    return AutoModelForCausalLM.from_config(config).double(), tokens(rows)


def qwen2() -> Example:
    return _decoder("qwen2")


def mistral() -> Example:
    """Attention that sees three tokens."""
    return _decoder("mistral", sliding_window=3)


def gemma2() -> Example:
    """Attention in steps with soft caps, in every second layer of a window."""
    return _decoder("gemma2", sliding_window=4, head_dim=8)


def mixtral() -> Example:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCABULARY,
    )  # fmt: skip
    return MixtralForCausalLM(config).double(), tokens()


def bert() -> Example:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=VOCABULARY,
        max_position_embeddings=16,
    )  # fmt: skip
    return BertForMaskedLM(config).double(), padded()


def vit() -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config).double(), images(size=16)


def t5() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config).double(), tokens()


def resnet() -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10)
    return ResNetForImageClassification(config).double(), images()


# Odd ones


class Twice(nn.Module):
    """A module that is called twice, a frozen one, one that is never called, and one tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.first = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.unused = nn.Linear(16, 3)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = torch.tanh(self.first(x))
        x = self.frozen(x) + x
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.first(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def twice() -> Example:
    ids = torch.randint(0, 24, (ROWS, 6))
    labels = ids.roll(1, 1)
    labels[0, 1:] = -100
    labels[2] = -100
    return Twice().double(), {"ids": ids, "labels": labels}


class TiedStages(nn.Module):
    """Embedding and head share a weight; made to be cut between ``first`` and ``second``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 24)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(self.embed(ids)))))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tied_stages() -> Example:
    _, batch = twice()
    return TiedStages().double(), batch


class Penalized(TiedStages):
    """A penalty of weights, an auxiliary loss of the first stage, and weights of losses that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = torch.tanh(self.first(self.embed(ids)))
        penalty = self.first.weight.square().sum() + self.second.weight.norm()
        losses = torch.stack([first.square().mean(), torch.tanh(self.second(first)).abs().mean()])
        return (losses * (-self.scales).exp() + self.scales).sum() + 0.01 * penalty


def penalized() -> Example:
    _, batch = twice()
    return Penalized().double(), batch


class Several(nn.Module):
    """Several inputs, one of them None and one a number, an output with None, in-place operators and views."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 8)
        self.right = nn.Linear(4, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, a: Tensor, b: Tensor, target: Tensor, weight: Tensor | None = None, power: int = 1) -> Any:
        x = self.left(a) + self.right(b)
        x = x.mul_(self.scale)
        x = torch.relu_(x)
        x = x.view(x.shape[0], 2, 4).transpose(1, 2).reshape(x.shape[0], 8)
        y = self.mix(x)
        y[:, 0] = y[:, 0] * 2
        y += x
        error = (self.head(y) - target).abs() ** power
        return {"loss": None if weight is not None else error.mean(), "hidden": None}["loss"], None, y


def several() -> Example:
    batch = {"a": torch.randn(ROWS, 6).double(), "b": torch.randn(ROWS, 4).double()}
    return Several().double(), {**batch, "target": torch.randn(ROWS, 3).double(), "weight": None, "power": 3}


class Blocks(nn.Module):
    """Checkpointed residual blocks under a tuple batch."""

    def __init__(self, size: int = 16, count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for _ in range(count)
        )
        self.head = nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def cross_entropy_of(output: Tensor, batch: Any) -> Tensor:
    """A loss outside of the model."""
    return nn.functional.cross_entropy(output, batch[-1])


def blocks() -> tuple[nn.Module, Any]:
    return Blocks().double(), (torch.randn(ROWS, 16).double(), torch.randint(0, 5, (ROWS,)))


class Counting(nn.Module):
    """A buffer that every training step changes, read before it is changed."""

    steps: Tensor
    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("offset", torch.ones(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.tanh(self.body(x)) + self.offset / (1 + self.steps)
        if self.training:
            self.steps += 1
        return nn.functional.cross_entropy(self.head(y), labels)


def counting() -> Example:
    return Counting().double(), {"x": torch.randn(ROWS, 6).double(), "labels": torch.randint(0, 3, (ROWS,))}


class Normalized(nn.Module):
    """Batch normalization in training: a statistic over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return nn.functional.cross_entropy(self.head(y), labels)


def normalized() -> Example:
    return Normalized().double(), {"x": torch.randn(ROWS, 3, 6, 6).double(), "labels": torch.randint(0, 4, (ROWS,))}


class TrunkAndHead(nn.Module):
    """A trunk and a classifier with many classes."""

    def __init__(self, classes: int = 50) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.LayerNorm(24))
        self.head = nn.Linear(24, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.trunk(x)), labels)


def trunk_and_head() -> Example:
    labels = torch.randint(0, 50, (ROWS * 2,))
    labels[:3] = -100
    return TrunkAndHead().double(), {"x": torch.randn(ROWS * 2, 12).double(), "labels": labels}


class LogProbabilities(TrunkAndHead):
    """A classifier of sequences whose loss takes log-probabilities, as a cross-entropy does under autocast on a GPU."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.trunk(x)).log_softmax(-1)
        return nn.functional.nll_loss(scores.flatten(0, 1), labels.flatten()) + 0.1 * scores.square().mean()


def log_probabilities() -> Example:
    """With more classes than ranks would move."""
    labels = torch.randint(0, 3001, (ROWS, 6))
    labels[0, 2:] = -100
    return LogProbabilities(3001).double(), {"x": torch.randn(ROWS, 6, 12).double(), "labels": labels}


def frozen_trunk() -> Example:
    """A trunk without gradients: what it sends needs none."""
    model, batch = trunk_and_head()
    model.get_submodule("trunk").requires_grad_(False)
    return model, batch
