"""Recovery of a job on mixed machines that loses one and gets it back: 4 -> 3 -> 4 ranks, and where the time goes.

    python benchmarks/elastic.py --write 2026-11-26

Four machines, processes of this one that stand for two fast devices, one of half and one of a third of their speed,
run `examples/elastic.py` under `whale run --elastic 3:4`, in float64, with a checkpoint every other step. One of the
fast ones is killed with its rank (SIGKILL), and later comes back. Each time all search a plan for the devices that are
there, or find that of the first start where these are there again, load the newest checkpoint and go on; the losses of
all attempts are compared with those of one process.

`detection` is from the loss to the first machine that notes it; `rendezvous` until ranks are started, with 5 s in which
others may still come, and up to 8 s until torch takes a silent machine for lost; `start` is Python, torch and
Whale; `search` is parallelize, with the capture, the search and the compilation; `load` is the checkpoint's; `first
step` ends with it. For a machine that comes back, detection is from the moment at which it asks to join.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import arguments, report, table

ROOT = Path(__file__).parents[1]
TYPES = ("cpu-fast", "cpu-fast", "cpu-mid", "cpu-slow")
LOST = 1
CLUSTER = """
[links]
inter_node = {bandwidth = "1 GB/s", latency = "50 us"}
[[nodes]]
count = 2
devices = 1
device = "cpu-fast"
[[nodes]]
devices = 1
device = "cpu-mid"
[[nodes]]
devices = 1
device = "cpu-slow"
""" + "".join(
    f'[device_types.{name}]\nspeed = {{float64 = "{speed} GFLOP/s", float32 = "{speed} GFLOP/s"}}\n'
    f'memory = "16 GiB"\nmemory_bandwidth = "{speed / 3} GB/s"\n'
    for name, speed in (("cpu-fast", 3), ("cpu-mid", 1.5), ("cpu-slow", 1))
)
SECONDS = 540.0


@dataclass
class Machine:
    """A ``whale run``, and what it says with the time at which it says it."""

    process: subprocess.Popen[str]
    said: list[tuple[float, str]] = field(default_factory=list)

    @classmethod
    def start(cls, number: int, port: int, folder: Path, steps: int, sgd: bool) -> Machine:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WHALE_DEVICE_TYPE": TYPES[number]}
        command = [
            sys.executable, "-m", "whale", "run", "--elastic", "3:4", "--endpoint", f"127.0.0.1:{port}",
            "--head" if number == 0 else "--no-head", str(ROOT / "examples" / "elastic.py"),
            "--cluster", str(folder / "four.toml"), "--directory", str(folder / "run"),
            "--steps", str(steps), "--pause", "0.5", *(["--sgd"] if sgd else []),
        ]  # fmt: skip
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        machine = cls(process)
        threading.Thread(target=machine._read, daemon=True).start()
        return machine

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((time.time(), line.rstrip()))

    def when(self, pattern: str, after: float) -> float | None:
        """When it first said something after a moment."""
        return next((at for at, line in list(self.said) if at >= after and re.search(pattern, line)), None)

    def kill(self) -> None:
        """Lose the machine: the agent and its ranks at once."""
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        for pid in [self.process.pid, *map(int, children)]:
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Leave no process."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def logged(folder: Path) -> list[dict[str, Any]]:
    file = folder / "run" / "log.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def attempts(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Notes of rank 0 at the start of each attempt."""
    return [one for one in found if one.get("rank") == 0]


def recovery(
    event: float, machines: list[Machine], attempt: dict[str, Any], found: list[dict[str, Any]]
) -> list[float]:
    """Seconds of detection, rendezvous, start, search, load, first step, and all."""
    seen = [at for one in machines if (at := one.when("start again|rank .* ended", event)) is not None]
    met = [at for one in machines for at, line in one.said if "have met" in line and event <= at <= attempt["began"]]
    first = next(one["time"] for one in found if one.get("step") == attempt["first"] and one["time"] > attempt["began"])
    loaded = attempt["began"] + attempt["search"] + attempt["load"]
    ends = [min(seen), max(met), attempt["began"], attempt["began"] + attempt["search"], loaded, first]
    return [after - before for before, after in zip([event, *ends], ends, strict=False)] + [first - event]


@dataclass
class Run:
    """Measurements of a run of 4 -> 3 -> 4 machines."""

    rows: list[tuple[str, ...]]
    again: list[int]
    ranks: list[dict[int, int]]
    worst: str
    load: float


def run(sgd: bool) -> Run:
    steps = 200
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="whale-elastic-") as name:
        folder = Path(name)
        (folder / "four.toml").write_text(CLUSTER)
        machines = [Machine.start(number, port, folder, steps, sgd) for number in range(len(TYPES))]
        events: list[float] = []
        began = time.monotonic()
        try:
            while True:
                found = logged(folder)
                started, done = attempts(found), [one["step"] for one in found if "step" in one]
                if time.monotonic() - began > SECONDS or sum(one.process.poll() is None for one in machines) < 3:
                    raise RuntimeError("\n".join(line for one in machines for _, line in one.said[-15:]))
                ahead = bool(started) and bool(done) and done[-1] >= started[-1]["first"] + 3
                if len(started) == 1 and ahead and not events:
                    machines[LOST].kill()
                    events.append(time.time())
                if len(started) == 2 and ahead and len(events) == 1:
                    machines.append(Machine.start(LOST, port, folder, steps, sgd))
                    came = machines[-1]
                    while (at := came.when("waiting for the other machines", 0.0)) is None:
                        time.sleep(0.05)
                    events.append(at)
                if len(started) == 3 and ahead:
                    break
                time.sleep(0.1)
        finally:
            for one in machines:
                one.end()
        found = logged(folder)
    rows = []
    for event, attempt, what in zip(events, attempts(found)[1:], ("one is lost", "it comes back"), strict=True):
        parts = recovery(event, machines, attempt, found)
        rows.append(("SGD" if sgd else "AdamW", what, *(f"{part:.1f}" for part in parts)))
    steps_done = [one["step"] for one in found if "step" in one]
    again = [steps_done.count(step) - 1 for step in sorted(set(steps_done)) if steps_done.count(step) > 1]
    ranks: list[dict[int, int]] = []
    for attempt in attempts(found):
        of_it = [one for one in found if "rank" in one and abs(one["began"] - attempt["began"]) < 30]
        ranks.append({one["rank"]: one["parameters"] for one in sorted(of_it, key=lambda one: one["rank"])})
    return Run(rows, again, ranks, differences(found, sgd), os.getloadavg()[1])


def differences(found: list[dict[str, Any]], sgd: bool) -> str:
    """Largest relative difference of all losses from those of one process."""
    program = (
        "import sys, json; sys.argv = ['elastic.py', *sys.argv[1:]]; exec(open('examples/elastic.py').read()"
        ".split('run = os.environ')[0]); print(json.dumps(list(alone())))"
    )
    losses: dict[int, list[float]] = {}
    for one in found:
        if "step" in one:
            losses.setdefault(one["step"], []).append(one["loss"])
    command = [sys.executable, "-c", program, "--steps", str(max(losses) + 1), *(["--sgd"] if sgd else [])]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    local = json.loads(
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    )
    worst = max(abs(loss - local[step]) / local[step] for step, own in losses.items() for loss in own)
    return f"{worst:.1e}"


def main() -> None:
    options = arguments(__doc__ or "")
    rows, texts = [], []
    for sgd in (True, False):
        if options.only not in ("SGD" if sgd else "AdamW"):
            continue
        done = run(sgd)
        rows += done.rows
        print(done, flush=True)
        texts.append(
            f"{'SGD' if sgd else 'AdamW'}: largest difference of a loss from one process {done.worst} (asked: "
            f"{'1e-12' if sgd else '1e-9'}); {len(done.again)} steps computed again, of two restarts with a checkpoint "
            f"every 2 steps; parameters of the ranks of each attempt: "
            + "; ".join(", ".join(str(count) for count in own.values()) for own in done.ranks)
            + f"; processes that ran or waited for one of {os.cpu_count()} cores: {done.load:.0f}"
        )
    head = ("optimizer", "event", "detection", "rendezvous", "start", "search", "load", "first step", "all, s")
    report("elastic", options, "\n\n".join([table(head, rows), *texts]))


if __name__ == "__main__":
    main()
