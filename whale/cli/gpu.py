"""``whale doctor --gpu``: every part in processes of its own, under a deadline; one report of all.

A part that hangs is a result: its processes are ended, and what NCCL's flight recorder has written is kept. It knows
parts by name; what they do is in `whale.cli.gpu_parts`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale.cli.tables import text_table

__all__ = ["PARTS", "Part", "gpu_text", "run_parts"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the report: its name, the seconds after which it hangs, and variables of its environment."""

    name: str
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


ONE_QUEUE = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}

PARTS = (
    Part(name="parity", seconds=180),
    Part(name="one queue", seconds=180, environment=ONE_QUEUE),
    Part(name="copies", seconds=120),
    Part(name="waits", seconds=90),
    Part(name="failures", seconds=90),
    Part(name="graphs", seconds=90),
    Part(name="communicators", seconds=30),
    Part(name="speed", seconds=180),
)

_RECORDER = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def run_parts(
    parts: Sequence[Part], ranks: int, device_type: str, tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Run parts one after another on a number of ranks of this machine; return what each found, by name.

    Every result has ``passed``, ``seconds`` and ``ranks``, with what ranks wrote, by rank; a part that failed has the
    ends of their outputs, one that hung says so.
    """
    found = {}
    for part in parts:
        tell(f"{part.name} on {ranks} ranks, at most {part.seconds:g} s")
        with tempfile.TemporaryDirectory(prefix="whale-doctor-") as folder:
            found[part.name] = _run(part, ranks, device_type, Path(folder))
    return found


def _run(part: Part, ranks: int, device_type: str, folder: Path) -> dict[str, Any]:
    begin = time.monotonic()
    port = _free_port()
    processes = [_start(part, rank, ranks, device_type, folder, port) for rank in range(ranks)]
    try:
        end = begin + part.seconds
        hung = [rank for rank, process in enumerate(processes) if not _ends(process, end - time.monotonic())]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    results = [_read(folder / f"{part.name}.{rank}.json") for rank in range(ranks)]
    passed = not hung and all(result.get("passed") for result in results)
    found: dict[str, Any] = {"passed": passed, "seconds": round(time.monotonic() - begin, 1), "ranks": results}
    if hung:
        found["hung"] = f"no end of ranks {hung} within {part.seconds:g} s"
        found["flight_recorder"] = {path.name: path.stat().st_size for path in sorted(folder.glob("trace_*"))}
    if not passed:
        found["output"] = [_end_of(folder / f"output.{rank}") for rank in range(ranks)]
    return found


def _start(part: Part, rank: int, ranks: int, device_type: str, folder: Path, port: int) -> subprocess.Popen[bytes]:
    launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    settings = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "trace_"), **_RECORDER}
    environment = os.environ | settings | {name: str(value) for name, value in launch.items()} | dict(part.environment)
    command = [sys.executable, "-m", "whale.cli.gpu_parts", part.name, str(folder), device_type]
    with (folder / f"output.{rank}").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _ends(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether a process ends in this time."""
    try:
        process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True


def _end_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-2000:]


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"passed": False, "error": "it wrote nothing"}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def gpu_text(report: Mapping[str, Any]) -> str:
    """The parts of a report as a table, with why those that failed did."""
    rows = []
    for name, part in report["parts"].items():
        error = next((f"rank {n}: {r['error']}" for n, r in enumerate(part["ranks"]) if "error" in r), "")
        rows.append([name, "passed" if part["passed"] else "FAILED", f"{part['seconds']:g} s", _shown(part) or error])
    return text_table("GPUs", ["part", "result", "took", "found"], rows)


def _shown(part: Mapping[str, Any]) -> str:
    """The figure of a part, in words; empty if it has none."""
    first = part["ranks"][0] if part["ranks"] else {}
    if "hung" in part:
        return str(part["hung"])
    if "cases" in first:
        return f"{len(first['cases'])} cases, largest error {max(case['error'] for case in first['cases']):.1e}"
    if "unlike" in first:
        return f"{len(first['unlike'])} unlike copies after {first['steps']} steps"
    if "others" in first:
        return f"{len(first['others'])} kinds of plans with other bits"
    if first.get("bytes") is not None:
        return f"{first['bytes'] / 2**20:.1f} MiB for each group"
    if "whale" in first:
        others = [f"{name} {first[name] * 1e3:.1f} ms" for name in ("graphs", "torch", "ddp") if name in first]
        speed = f"{first['flops_per_second'] / 1e12:.1f} TFLOP/s"
        return ", ".join([f"whale {first['whale'] * 1e3:.1f} ms", *others, speed])
    return ""
