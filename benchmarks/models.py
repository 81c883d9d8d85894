"""The models of the benchmarks: Hugging Face GPT-2 and Llama, without dropout unless asked for, and their batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WORDS = 1024


def gpt2(
    *,
    width: int = 256,
    layers: int = 4,
    length: int = 128,
    heads: int = 4,
    activation: str = "gelu_new",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    words: int = WORDS,
) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, n_positions=length, vocab_size=words,
        activation_function=activation, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=attention_dropout,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(*, width: int = 256, layers: int = 4, heads: int = 4, words: int = 64) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=words, max_position_embeddings=256, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(rows: int, length: int, words: int = WORDS) -> dict[str, Tensor]:
    drawn = torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, "labels": drawn.clone()}
