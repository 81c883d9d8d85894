"""Faults: each case breaks a run on purpose, and must end as it should before a hard deadline; a hang is a failure.

    PYTHONPATH=. python benchmarks/faults.py --count 20 --seed 1
    PYTHONPATH=. python benchmarks/faults.py --only "two agents" --count 10
    PYTHONPATH=. python benchmarks/faults.py --only corruption --count 1000

Areas, and what must be:

- kills, one agent: SIGKILL of a rank at any point of a step, or before any call of the system that a save makes:
  losses, weights and random numbers are those of the run that never stopped, bitwise; no process is left after 5 s
- kills, two agents: the same of ranks of two agents that meet by c10d or by static rendezvous
- stops: SIGSTOP of a rank, or a rank whose script ends early: another rank names it within the limit and 2 s, code 6
- full disk: no file may grow on one rank while it saves: all ranks end with the reason, and the next attempt goes on
  from the checkpoint before
- folders apart: ranks save to folders of their own: all ranks say so, code 5
- two savers: a second job saves to the directory: it is refused, and the first one is not harmed
- numbers: NaN or infinity in the rows of one rank, with scaled losses: all ranks skip that step, parameters unchanged
- corruption: a flipped bit, a cut, a missing, swapped or longer file: the right bytes, of this checkpoint or of the one
  before, or an error, and then nothing has changed
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults_script import LAYOUTS, Fault
from harness import report, table

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("faults_script.py")
POINTS = ("init", "built", "step", "update", "during", "save")
STEPS = 6


@dataclass(frozen=True)
class Ended:
    """The end of a run: the codes of its agents, what they printed, and the seconds it took."""

    codes: tuple[int, ...]
    text: str
    seconds: float


def launched(
    folder: Path, layout: str, fault: Fault, *more: str, agents: str = "one", restarts: int = 3, deadline: float
) -> Ended:
    """Run the script on two ranks, of one agent or of two; raises `AssertionError` if it does not end in time."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={restarts}"]
    script = [str(SCRIPT), str(folder), "--layout", layout, "--fault", json.dumps(asdict(fault)), *more]
    if agents == "one":
        commands = [[*torchrun, "--standalone", "--nproc-per-node=2", *script]]
    else:
        meet = {
            "c10d": [
                "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1",
                "--rdzv-id=faults", "--local-addr=127.0.0.1",
            ],
            "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        }[agents]  # fmt: skip
        own = [*torchrun, "--nnodes=2", "--nproc-per-node=1", *meet]
        commands = [[*own, *([f"--node-rank={i}"] if agents == "static" else []), *script] for i in range(2)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    begin = time.monotonic()
    with open(folder / "out", "ab") as out:
        started = [
            subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
            for command in commands
        ]
        try:
            codes = [one.wait(max(1.0, begin + deadline - time.monotonic())) for one in started]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {deadline:g} s: {tail(folder)}") from None
        finally:
            for one in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()
    left = orphans(folder)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, f"{len(left)} processes are left after 5 s"
    return Ended(tuple(codes), (folder / "out").read_text(errors="replace"), time.monotonic() - begin)


def tail(folder: Path) -> str:
    lines = (folder / "out").read_text(errors="replace").splitlines()
    return " | ".join([line for line in lines if "Error" in line][-3:] or lines[-3:])[-600:]


def orphans(folder: Path, seconds: float = 5.0) -> list[int]:
    """Processes of a run that live on; agents start each rank in a session of its own."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = place.read_bytes().split(b"\0")
                if str(SCRIPT).encode() in words and str(folder).encode() in words:
                    found.append(int(place.parent.name))
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def curve(folder: Path) -> dict[str, Any]:
    """The log of a run: losses by step, weights and the next random number. Attempts must agree."""
    found: dict[str, Any] = {}
    for line in (folder / "log").read_text().splitlines():
        said = json.loads(line)
        if "loss" in said:
            said = {f"loss of step {said['step']}": said["loss"]}
        for name, value in said.items():
            assert name == "start" or found.get(name, value) == value, f"{name} is {found[name]}, and then {value}"
            found[name] = value
    found.pop("start")
    return found


class Bench:
    """Cases, and what a run without a fault gives under each layout."""

    def __init__(self, folder: Path, seed: int, deadline: float) -> None:
        self.folder, self.draw, self.deadline = folder, random.Random(seed), deadline
        self._expected: dict[str, dict[str, Any]] = {}
        self._count = 0

    def fresh(self) -> Path:
        self._count += 1
        return self.folder / f"case-{self._count}"

    def expected(self, layout: str) -> dict[str, Any]:
        if layout not in self._expected:
            folder = self.fresh()
            launched(folder, layout, Fault(), deadline=self.deadline)
            self._expected[layout] = curve(folder)
            assert len(self._expected[layout]) == STEPS + 2, tail(folder)
        return self._expected[layout]

    # Cases: each returns what it was, or raises an `AssertionError`

    def kill(self, agents: str = "one") -> str:
        """A rank is killed somewhere."""
        draw = self.draw
        point, layout = draw.choice(POINTS), draw.choice(list(LAYOUTS))
        step = draw.choice([2, 4]) if point == "save" else draw.randrange(STEPS)
        fault = Fault(point, draw.randrange(2), step, delay=draw.random() * 0.1, call=draw.randrange(12))
        folder, synchronous = self.fresh(), draw.random() < 0.3
        more = ["--synchronous"] if synchronous else []
        what = f"{layout}, {agents}, rank {fault.rank} at {point} of step {step}, call {fault.call}"
        ended = launched(folder, layout, fault, *more, agents=agents, deadline=self.deadline)
        assert not any(ended.codes), f"{what}: {ended.codes}: {tail(folder)}"
        found, expected = curve(folder), self.expected(layout)
        assert found == expected, f"{what}: {[name for name in expected if found.get(name) != expected[name]]}"
        happened = "" if (folder / "happened").exists() else ", which did not come"
        return what + happened

    def kill_of_two(self) -> str:
        return self.kill(self.draw.choice(["c10d", "static"]))

    def stop(self) -> str:
        """A rank stops, or leaves."""
        act, layout, rank = self.draw.choice(["stop", "leave"]), self.draw.choice(list(LAYOUTS)), self.draw.randrange(2)
        folder, what = self.fresh(), f"{act} of rank {rank}, {layout}"
        fault = Fault("step", rank, self.draw.randrange(1, STEPS), act=act)
        ended = launched(folder, layout, fault, "--timeout", "10", restarts=0, deadline=self.deadline)
        said = re.search(r"at (\d+\.\d+): WorkerError: (.*)", ended.text)
        assert said, f"{what}: {tail(folder)}"
        late = float(said[1]) - float((folder / "happened").read_text()) - 10
        assert late <= 2, f"{what}: {late:.1f} s late"
        assert re.search(rf"rank {rank} |, and rank {rank}\b", said[2]), f"{what}: {said[2]}"
        assert "exitcode  : 6" in ended.text, f"{what}: {tail(folder)}"
        return f"{what}: {said[2][:80]}"

    def full(self) -> str:
        """No file may grow on a rank."""
        layout, rank = self.draw.choice(list(LAYOUTS)), self.draw.randrange(2)
        folder, fault = self.fresh(), Fault("save", rank, 4, act="full")
        ended = launched(folder, layout, fault, restarts=1, deadline=self.deadline)
        assert not any(ended.codes), tail(folder)
        assert f"rank {rank}: File too large" in ended.text, tail(folder)
        assert curve(folder) == self.expected(layout)
        starts = [json.loads(line).get("start") for line in (folder / "log").read_text().splitlines()]
        assert [x for x in starts if x is not None] == [0, 2], f"attempts began at {starts}"
        return f"{layout}, rank {rank}"

    def apart(self) -> str:
        """Ranks save to folders of their own."""
        folder = self.fresh()
        layout = self.draw.choice(list(LAYOUTS))
        ended = launched(folder, layout, Fault(), "--apart", restarts=0, deadline=self.deadline)
        assert "rank 1: it does not see" in ended.text and "exitcode  : 5" in ended.text, tail(folder)
        return layout

    def savers(self) -> str:
        """A second process saves to the directory."""
        import torch
        from torch import nn

        import whale
        from whale.checkpoint import folder as folders

        folder = self.fresh()
        batch = torch.ones(4, 6)
        model = whale.parallelize(nn.Linear(6, 1), batch, loss_fn=lambda y, _: y.sum(), device="cpu")
        whale.save_checkpoint(folder, model, step=1, asynchronous=False)
        code = f"from pathlib import Path; from whale.checkpoint.folder import begin; begin(Path({str(folder)!r}), 2)"
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        other = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=self.deadline,
            check=False,
        )
        assert f"process {os.getpid()} on" in other.stderr and "saves checkpoints here" in other.stderr, other.stderr[
            -300:
        ]
        whale.save_checkpoint(folder, model, step=2, asynchronous=False)
        assert folders.steps(folder) == [2, 1]
        folders.release(folder)
        return "one process each"

    def numbers(self) -> str:
        """A rank's rows have no finite gradients."""
        value, rank = self.draw.choice(["nan", "inf"]), self.draw.randrange(2)
        folder = self.fresh()
        folder.mkdir()
        script = Path(__file__).with_name("faults_numbers.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*command, str(script), value, str(rank), self.draw.choice(["replicate", "zero"])],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True, text=True, timeout=self.deadline, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-400:]
        assert done.stdout.count("skipped alike;") == 2, done.stdout[-300:]
        return f"{value} on rank {rank}"


def corruptions(count: int, seed: int, folder: Path) -> tuple[Counter[str], str]:
    """How loads of damaged checkpoints ended."""
    import torch
    from torch import nn

    import whale
    from whale.errors import WhaleError

    torch.manual_seed(0)
    batch = torch.ones(4, 6)
    net = nn.Sequential(nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
    model = whale.parallelize(net, batch, loss_fn=lambda y, _: y.square().mean(), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def digest() -> str:
        states = [x for p in model.parameters() for _, x in sorted(optimizer.state[p].items())]
        tensors = [*model.full_state_dict().values(), *states]
        return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()

    good, names = {}, {}
    for step in (1, 2):
        model.train_step(batch)
        optimizer.step()
        whale.save_checkpoint(folder / "good", model, step=step, optimizer=optimizer, asynchronous=False)
        good[step] = digest()
        names[step] = folder / "good" / f"step-{step:08d}"
    draw, ends = random.Random(seed), Counter[str]()
    for _ in range(count):
        own = folder / "damaged"
        shutil.rmtree(own, ignore_errors=True)
        shutil.copytree(folder / "good", own)
        both = draw.random() < 0.2  # the one before is damaged, too
        for step in (1, 2) if both else (2,):
            file = draw.choice(sorted((own / f"step-{step:08d}").iterdir()))
            content = bytearray(file.read_bytes())
            at = draw.randrange(len(content))
            match draw.choice(["flip", "flip", "cut", "missing", "swap", "longer"]):
                case "flip":
                    content[at] ^= 1 << draw.randrange(8)
                case "cut":
                    del content[at:]
                case "missing":
                    file.unlink()
                    continue
                case "swap":
                    content[:] = (names[3 - step] / file.name).read_bytes()
                case "longer":
                    content += bytes(draw.randrange(1, 9))
            file.write_bytes(content)
        before = digest()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                done = whale.load_checkpoint(own, model, optimizer=optimizer)
        except WhaleError as error:
            ends["refused" if digest() == before else f"WRONG: changed, and {error}"] += 1
        except Exception as error:
            ends[f"WRONG: {type(error).__name__}"] += 1
        else:
            step = done.step if done else 0
            ends[f"step {step}, right" if good.get(step) == digest() else "WRONG BYTES"] += 1
    wrong = "; ".join(f"{name}: {number}" for name, number in ends.items() if "WRONG" in name)
    return ends, wrong


CASES: dict[str, Callable[[Bench], str]] = {
    "kills, one agent": Bench.kill,
    "kills, two agents": Bench.kill_of_two,
    "stops": Bench.stop,
    "full disk": Bench.full,
    "folders apart": Bench.apart,
    "two savers": Bench.savers,
    "numbers": Bench.numbers,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5, help="cases of each area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="areas whose name contains this")
    parser.add_argument("--deadline", type=float, default=180.0, metavar="SECONDS", help="of one run")
    parser.add_argument("--write", metavar="DATE", default="")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), options.seed, options.deadline)
        for name, case in CASES.items():
            if options.only not in name:
                continue
            failed, seconds = [], 0.0
            for _ in range(options.count):
                begin = time.monotonic()
                try:
                    print(f"{name}: {case(bench)}", flush=True)
                except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
                    failed.append(str(error))
                    print(f"{name}: FAILED: {error}", flush=True)
                seconds = max(seconds, time.monotonic() - begin)
            rows.append(
                (name, f"{options.count - len(failed)} of {options.count}", f"{seconds:.0f}", "; ".join(failed))
            )
        if options.only in "corruption":
            begin = time.monotonic()
            ends, wrong = corruptions(options.count, options.seed, Path(place))
            print(dict(ends), flush=True)
            bad = sum(number for end, number in ends.items() if "WRONG" in end)
            seconds = (time.monotonic() - begin) / options.count
            rows.append(("corruption", f"{options.count - bad} of {options.count}", f"{seconds:.2f}", wrong))
    text = table(("area", "as it must be", "most seconds of a case", "failures"), rows)
    command = f"python benchmarks/faults.py --count {options.count} --seed {options.seed}"
    report("faults", options, text, command + (f" --only '{options.only}'" if options.only else ""))
    raise SystemExit(any(row[-1] for row in rows))


if __name__ == "__main__":
    main()
