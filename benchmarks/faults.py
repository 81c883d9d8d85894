"""Faults: each case breaks a run on purpose, and must end as it should before a hard deadline; a hang is a failure.

    PYTHONPATH=. python benchmarks/faults.py --count 20 --seed 1
    PYTHONPATH=. python benchmarks/faults.py --only "two agents" --count 10 --executed 10

Areas, and what must be:

- kills, one agent: SIGKILL of a rank at any point of a step, before any call of its communication, or before any call
  of the system that a save makes: losses, weights, states of the optimizer and random numbers are those of the run that
  never stopped, bitwise; no process is left after 5 s. Only trials in which the rank was killed count
- kills, two agents: the same of ranks of two agents that meet by c10d and by static rendezvous, in turns
- stops: SIGSTOP of a rank, or a rank whose script ends early: another rank names it within the limit and 2 s, code 6
- skipped: a rank leaves out a step, a save or the call for whole weights: all ranks end with an error of Whale, which
  names that rank or what differs: within the limit and 2 s after the rank comes to what the others do not do. A step
  left out is another batch in the next one, which is found where values are compared: in the first three, and each 64th
- full disk: no file may grow on one rank while it saves: all ranks end with the reason, and the next attempt goes on
  from the checkpoint before
- folders apart: ranks save to folders of their own: all ranks say so, code 5
- two savers: a second job saves to the directory: it is refused, and the first one is not harmed
- numbers: NaN or infinity in the rows of one rank, with scaled losses: all ranks skip that step, parameters unchanged
- corruption: a flipped bit, a cut, a missing, swapped or longer file: the right bytes, of this checkpoint or of the one
  before, or an error, and then nothing has changed

Models and layouts are those of `faults_script.py`, in turns. torchrun's agents and their ranks are forks of a process
that has made the imports (`forked_torchrun.py`), except in each tenth kill, where all are programs that are executed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
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
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from faults_script import LAYOUTS, Fault
from forked_torchrun import Agent
from harness import report, table

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("faults_script.py")
POINTS = ("init", "built", "step", "communication", "communication", "update", "during", "during", "save", "save")
STEPS = 6
LIMIT = 10
"""Seconds for which ranks wait for each other where one does not come."""


@dataclass(frozen=True)
class Ended:
    """The end of a run: the codes of its agents, what they printed, and the seconds it took."""

    codes: tuple[int, ...]
    text: str
    seconds: float


class Program:
    """torchrun as a program of its own."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], output: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        with open(output, "ab") as out:
            self._process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises `subprocess.TimeoutExpired` if it does not end within *timeout* seconds."""
        return self._process.wait(timeout)


def ended(
    folder: Path, ranks: int, script: Sequence[str], *, agents: str, restarts: int, deadline: float, executed: bool
) -> Ended:
    """Run a script on ranks of one agent or of two; raises `AssertionError` if it does not end in time, or leaves a
    process."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [f"--max-restarts={restarts}"]
    if agents == "one":
        each = [[*common, "--standalone", f"--nproc-per-node={ranks}", *script]]
    else:
        meet = {
            "c10d": [
                "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1",
                "--rdzv-id=faults", "--local-addr=127.0.0.1",
            ],
            "static": ["--master-addr=127.0.0.1", f"--master-port={port}"],
        }[agents]  # fmt: skip
        each = []
        for number, own in enumerate((ranks // 2, ranks - ranks // 2)):
            named = [f"--node-rank={number}"] if agents == "static" else []
            each.append([*common, "--nnodes=2", f"--nproc-per-node={own}", *meet, *named, *script])
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    begin, out = time.monotonic(), folder / "out"
    started = [(Program if executed else Agent)(arguments, environment, out) for arguments in each]
    codes: list[int] = []
    try:
        for one in started:
            codes.append(one.wait(max(1.0, begin + deadline - time.monotonic())))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end after {deadline:g} s: {tail(folder)}") from None
    finally:
        left = writers(out, 5.0 if len(codes) == len(started) else 0.0)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert not left, f"{len(left)} processes are left after 5 s"
    return Ended(tuple(codes), out.read_text(errors="replace"), time.monotonic() - begin)


def writers(output: Path, seconds: float) -> list[int]:
    """Processes that live on after *seconds* and write to this file, as all of a run do."""
    end = time.monotonic() + seconds
    while True:
        found = []
        for place in Path("/proc").glob("[0-9]*/fd/1"):
            with contextlib.suppress(OSError):
                if os.readlink(place) == str(output):
                    found.append(int(place.parts[2]))
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.2)


def tail(folder: Path) -> str:
    lines = (folder / "out").read_text(errors="replace").splitlines()
    return " | ".join([line for line in lines if "Error" in line][-3:] or lines[-3:])[-600:]


def curve(folder: Path) -> dict[str, Any]:
    """The log of a run: losses by step; weights, and states and the next random number of each rank. Attempts agree."""
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


@dataclass
class Bench:
    """Cases, and what a run without a fault gives under each layout."""

    folder: Path
    seed: int
    deadline: float
    each_executed: int
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)  # what was tried
    _expected: dict[str, dict[str, Any]] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(default_factory=lambda: {name: threading.Lock() for name in LAYOUTS})
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def draw(self, area: str, number: int) -> random.Random:
        """Random numbers of a case."""
        return random.Random(f"{self.seed} {area} {number}")

    def layout(self, number: int, like: str = "") -> str:
        """The layout of a case: all whose names have *like*, in turns, each time in another order."""
        names = [name for name in LAYOUTS if like in name]
        turn, place = divmod(number, len(names))
        return random.Random(f"{self.seed} {turn}").sample(names, len(names))[place]

    def fresh(self) -> Path:
        return self.folder / f"case-{next(self._numbers)}"

    def run(
        self,
        folder: Path,
        layout: str,
        fault: Fault,
        *more: str,
        agents: str = "one",
        restarts: int = 3,
        executed: bool = False,
    ) -> Ended:
        script = [str(SCRIPT), str(folder), "--layout", layout, "--fault", json.dumps(asdict(fault)), *more]
        ranks = LAYOUTS[layout].ranks
        return ended(folder, ranks, script, agents=agents, restarts=restarts, deadline=self.deadline, executed=executed)

    def expected(self, layout: str) -> dict[str, Any]:
        with self._locks[layout]:
            if layout not in self._expected:
                folder = self.fresh()
                self.run(folder, layout, Fault())
                found = curve(folder)
                assert len(found) == STEPS + 1 + 2 * LAYOUTS[layout].ranks, tail(folder)
                self._expected[layout] = found
            return self._expected[layout]

    def case(self, area: str, one: Callable[[Bench, int], str], number: int) -> tuple[str, float]:
        """Run a case; returns its failure, or an empty text, and the seconds that it took."""
        begin, wrong = time.monotonic(), ""
        try:
            print(f"{area}, {number}: {one(self, number)}", flush=True)
        except (AssertionError, OSError) as error:
            wrong = f"{number}: {error}"
            print(f"{area}: FAILED: {wrong}", flush=True)
        return wrong, time.monotonic() - begin

    # Cases: each returns what it was, or raises an `AssertionError`

    def kill(self, number: int, agents: str = "one") -> str:
        """A rank is killed somewhere."""
        draw, layout = self.draw(f"kill {agents}", number), self.layout(number)
        executed = self.each_executed > 0 and number % self.each_executed == 0
        expected = self.expected(layout)
        while True:
            point = draw.choice(POINTS)
            step = draw.choice([2, 4]) if point == "save" else draw.randrange(STEPS)
            call = draw.randrange(12 if point == "save" else 24)
            fault = Fault(point, draw.randrange(LAYOUTS[layout].ranks), step, delay=draw.random() * 0.1, call=call)
            folder, synchronous = self.fresh(), draw.random() < 0.3
            more = ["--synchronous"] if synchronous else []
            where = f"rank {fault.rank} at {point} of step {step}, call {call}, {fault.delay:.3f} s"
            what = f"{layout}, {agents}{', executed' if executed else ''}, {where}{', waiting' if synchronous else ''}"
            done = self.run(folder, layout, fault, *more, agents=agents, executed=executed)
            assert not any(done.codes), f"{what}: {done.codes}: {tail(folder)}"
            found = curve(folder)
            assert found == expected, f"{what}: {[name for name in expected if found.get(name) != expected[name]]}"
            if (folder / "happened").exists():
                break
        starts = [json.loads(line)["start"] for line in (folder / "log").read_text().splitlines() if "start" in line]
        kinds = {"layout": layout, "point": point, "agents": agents, "processes": "executed" if executed else "forked"}
        with self._lock:
            self.seen.update(kinds.items())
        shutil.rmtree(folder)
        return f"{what}: from {starts}, {done.seconds:.1f} s"

    def kill_of_two(self, number: int) -> str:
        return self.kill(number, ("c10d", "static")[number % 2])

    def stop(self, number: int) -> str:
        """A rank stops, or leaves."""
        draw, layout = self.draw("stop", number), self.layout(number)
        act, rank = draw.choice(["stop", "leave"]), draw.randrange(LAYOUTS[layout].ranks)
        what = f"{act} of rank {rank}, {layout}"
        said, late = self._failed(Fault("step", rank, draw.randrange(1, STEPS), act=act), layout, what)
        assert re.search(rf"rank {rank} |, and rank {rank}\b", said), f"{what}: {said}"
        return f"{what}: {late:+.1f} s: {said[:120]}"

    def skip(self, number: int) -> str:
        """A rank leaves out a call that the others make."""
        draw = self.draw("skip", number)
        point = draw.choice(["step", "step", "save", "end"])
        layout = self.layout(number, "tp" if point == "end" else "")  # others need nothing of each other for weights
        rank = draw.randrange(LAYOUTS[layout].ranks)
        step = draw.choice([2, 4]) if point == "save" else draw.randrange(1, STEPS)
        what = f"rank {rank} skips the {point} of step {step}, {layout}"
        said, late = self._failed(Fault(point, rank, step, act="skip"), layout, what)
        assert re.search(rf"ranks? \[?[\d, ]*\b{rank}\b|with other values", said), f"{what}: {said}"
        return f"{what}: {late:+.1f} s: {said[:200]}"

    def _failed(self, fault: Fault, layout: str, what: str) -> tuple[str, float]:
        """The first error after a fault, and how many seconds after the limit it came."""
        folder = self.fresh()
        done = self.run(folder, layout, fault, "--timeout", str(LIMIT), restarts=0)
        errors = sorted(re.findall(r"at (\d+\.\d+): (\w+: .*)", done.text))
        assert errors and any(done.codes), f"{what}: {done.codes}, {tail(folder)}"
        late = float(errors[0][0]) - float((folder / "happened").read_text()) - LIMIT
        assert late <= 2, f"{what}: {late:.1f} s late: {errors[0][1]}"
        return errors[0][1], late

    def full(self, number: int) -> str:
        """No file may grow on a rank."""
        layout = self.layout(number)
        rank = self.draw("full", number).randrange(LAYOUTS[layout].ranks)
        folder, fault = self.fresh(), Fault("save", rank, 4, act="full")
        done = self.run(folder, layout, fault, restarts=1)
        assert not any(done.codes), tail(folder)
        assert f"rank {rank}: File too large" in done.text, tail(folder)
        assert curve(folder) == self.expected(layout)
        starts = [json.loads(line).get("start") for line in (folder / "log").read_text().splitlines()]
        assert [x for x in starts if x is not None] == [0, 2], f"attempts began at {starts}"
        return f"{layout}, rank {rank}"

    def apart(self, number: int) -> str:
        """Ranks save to folders of their own."""
        folder, layout = self.fresh(), self.layout(number)
        done = self.run(folder, layout, Fault(), "--apart", restarts=0)
        assert re.search(r"rank [1-3]: it does not see", done.text), tail(folder)
        assert "exitcode  : 5" in done.text, tail(folder)
        return layout

    def savers(self, number: int) -> str:
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
        said = other.stderr
        assert f"process {os.getpid()} on" in said and "saves checkpoints here" in said, said[-300:]
        whale.save_checkpoint(folder, model, step=2, asynchronous=False)
        assert folders.steps(folder) == [2, 1]
        folders.release(folder)
        return "one process each"

    def numbers(self, number: int) -> str:
        """A rank's rows have no finite gradients."""
        draw = self.draw("numbers", number)
        value, rank, layout = draw.choice(["nan", "inf"]), draw.randrange(2), draw.choice(["replicate", "zero"])
        script = [str(Path(__file__).with_name("faults_numbers.py")), value, str(rank), layout]
        folder = self.fresh()
        done = ended(folder, 2, script, agents="one", restarts=0, deadline=self.deadline, executed=False)
        assert not any(done.codes) and done.text.count("skipped alike;") == 2, tail(folder)
        return f"{value} on rank {rank}, {layout}"


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


CASES: dict[str, tuple[Callable[[Bench, int], str], float]] = {
    "kills, one agent": (Bench.kill, 1.0),
    "kills, two agents": (Bench.kill_of_two, 0.2),
    "stops": (Bench.stop, 0.2),
    "skipped": (Bench.skip, 0.2),
    "full disk": (Bench.full, 0.1),
    "folders apart": (Bench.apart, 0.05),
    "two savers": (Bench.savers, 0.02),
    "numbers": (Bench.numbers, 0.1),
}
"""With the number of cases, as a part of ``--count``."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="kills with one agent; other areas have fewer cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="areas whose name contains this; each has --count cases then")
    parser.add_argument(
        "--executed", type=int, default=10, metavar="N", help="each Nth kill is of programs [10]; 0: none"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cases at a time [1]")
    parser.add_argument("--deadline", type=float, default=180.0, metavar="SECONDS", help="of one run")
    parser.add_argument("--write", metavar="DATE", default="")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), options.seed, options.deadline, options.executed)
        for name, (case, part) in CASES.items():
            if options.only not in name:
                continue
            count = options.count if options.only else max(1, round(options.count * part))
            with ThreadPoolExecutor(1 if case is Bench.savers else options.jobs) as pool:
                found = list(pool.map(partial(bench.case, name, case), range(count)))
            failed = [why for why, _ in found if why]
            seconds = max(taken for _, taken in found)
            rows.append((name, f"{count - len(failed)} of {count}", f"{seconds:.0f}", "; ".join(failed)))
        if options.only in "corruption":
            begin = time.monotonic()
            count = options.count * (1 if options.only else 10)
            ends, wrong = corruptions(count, options.seed, Path(place))
            print(dict(ends), flush=True)
            bad = sum(number for end, number in ends.items() if "WRONG" in end)
            seconds = (time.monotonic() - begin) / count
            rows.append(("corruption", f"{count - bad} of {count}", f"{seconds:.2f}", wrong))
    texts = [table(("area", "as it must be", "most seconds of a case", "failures"), rows)]
    for what in ("agents", "processes", "point", "layout"):
        seen = [(name, str(number)) for (of, name), number in sorted(bench.seen.items()) if of == what]
        if seen:
            texts.append(table((f"kills by {what}", "trials"), seen))
    command = f"python benchmarks/faults.py --count {options.count} --seed {options.seed}"
    command += f" --only '{options.only}'" if options.only else ""
    report("faults", options, "\n\n".join(texts), command)
    raise SystemExit(any(row[-1] for row in rows))


if __name__ == "__main__":
    main()
