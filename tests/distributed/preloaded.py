"""Imports of most tests' ranks, made once in the server that they are forked from. It starts no thread.

What a rank imports in its first step (most of Whale is imported when it is first used, and so are the models of
Hugging Face) takes ten times as long as the step of a small model.
"""

import gc
import importlib
import importlib.util
import pkgutil
import sys

import hypothesis
import pytest
import torch._inductor.compile_fx
import torch.distributed.pipelining
import torch.export
import transformers
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

import whale
from tests.collecting import collect_seldom
from tests.distributed import harness, parity

__all__ = ["harness", "hypothesis", "parity", "pytest", "torch", "transformers", "whale"]

for _module in pkgutil.walk_packages(whale.__path__, "whale."):
    if not _module.name.endswith("__main__"):
        try:
            importlib.import_module(_module.name)
        except ModuleNotFoundError as _missing:
            if str(_missing.name).startswith("whale"):  # others are libraries that only this module needs
                raise
for _family in ("bert", "gpt2", "llama", "mixtral", "t5"):
    importlib.import_module(f"transformers.models.{_family}.modeling_{_family}")
if importlib.util.find_spec("accelerate"):
    importlib.import_module("transformers.trainer")
# For the name of a caller torch's agents look through the files of all modules, of which there are thousands here.
dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
gc.freeze()  # ranks collect their own garbage, and do not look through these million objects, nor copy their pages
collect_seldom()
