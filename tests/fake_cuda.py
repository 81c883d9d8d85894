"""Compiles models for CUDA devices that do not exist.

A process needs a library of `build_guard` for that, preloaded.

torch without CUDA refuses autograd on fake CUDA tensors, because nothing can make a device the current one. The library
registers a guard that does nothing, which is sufficient for tensors without data. Preloaded, before torch asks for the
first time, it also says that there are devices, so that autograd has queues for them. A model is traced once for each
device.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

import whale
from whale.cli.model_loader import LoadedModel, load_model
from whale.compile.compile import compile_traced
from whale.compile.options import Options
from whale.compile.trace import Traced, trace
from whale.ir.cluster import Cluster
from whale.runtime.random import RNGPosition

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl {
struct Guard final : public NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 8; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Stream getStream(Device d) const noexcept override { return Stream(Stream::DEFAULT, d); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, d); }
  Stream exchangeStream(Stream s) const noexcept override { return s; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
struct CUDAHooks final : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 8; }
  int getNumGPUs() const override { return 8; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks)
}
"""

SMALL: dict[str, dict[str, object]] = {
    "examples/models/gpt.py:gpt": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 64},
    "examples/models/llama.py:llama": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 64},
    "examples/models/bert.py:bert": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 64},
    "examples/models/t5.py:t5": {"layers": 1, "hidden": 64, "heads": 4, "seq": 32, "vocab": 64},
    "examples/models/moe.py:moe": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 64},
    "examples/models/gshard.py:gshard": {"layers": 2, "hidden": 64, "heads": 4, "seq": 32, "vocab": 64},
    "examples/models/resnet.py:resnet": {"layers": 14, "classes": 10, "size": 32},
    "hf:gpt2": {"num_hidden_layers": 2, "n_embd": 64, "n_head": 4, "sequence_length": 32},
    "hf:llama": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "sequence_length": 32},
    "hf:bert": {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 128, "sequence_length": 32},
    "hf:t5": {"num_layers": 1, "num_decoder_layers": 1, "sequence_length": 32},
    "hf:mixtral": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "sequence_length": 32},
    "hf:vit": {"num_hidden_layers": 1},
}


def build_guard(folder: Path) -> Path | None:
    """The library, or None if there is no C++ compiler, or torch is built for CUDA and has such hooks."""
    if torch.version.cuda is not None:
        return None
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(SOURCE)
    root = Path(torch.__file__).parent
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    options.append(f"-Wl,-rpath,{root / 'lib'}")
    subprocess.run([compiler, str(source), "-o", str(library), *options], check=True, timeout=120)
    return library


def devices_in(graph: fx.Graph) -> Iterator[torch.device]:
    """The devices that a graph's operators name."""
    found: list[torch.device] = []

    def note(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            found.append(argument)
        return argument

    for node in graph.nodes:
        fx.node.map_aggregate((node.args, node.kwargs), note)
    yield from found


def small(spec: str) -> LoadedModel:
    """A model without data, and its batch."""
    return load_model(spec, SMALL[spec], device="meta", batch_size=8)


@cache
def traced_on(device: torch.device, spec: str, precision: str | None = None) -> Traced:
    """The trace of a model without annotations."""
    loaded = small(spec)
    return trace(loaded.model, loaded.batch, device=device, training=True, precision=precision)


def compiled(spec: str, rank: int) -> dict[str, Any]:
    """The texts and devices of rank *rank* of two, on ``cuda:{rank}``, under data and tensor parallelism."""
    device = torch.device("cuda", rank)
    said: dict[str, Any] = {}
    traced = traced_on(device, spec)
    for name, default in (("replicate", whale.replicate()), ("split", whale.split())):
        compilation = compile_traced(traced, Cluster.homogeneous(2), Options(default=default.strategy), device=device)
        clock = RNGPosition(0)
        programs = [p for s in compilation.stages for p in compilation.local_programs(s, rank, clock)]
        graphs = [g.code.graph for p in programs for g in (p.constant, p.step, p.micro_batch)]
        said[name] = {
            "texts": {**compilation.texts(), "calls": compilation.check(rank, clock)},
            "devices": sorted({str(d) for graph in graphs for d in devices_in(graph)}),
        }
    return said
