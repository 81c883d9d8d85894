"""Imports of most tests' ranks, made once in the server that they are forked from. It starts no thread."""

import torch.distributed.pipelining
import torch.export
import transformers

import whale
from tests.distributed import harness, parity
from whale.runtime import launch

__all__ = ["harness", "launch", "parity", "torch", "transformers", "whale"]
