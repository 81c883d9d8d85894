"""Learning curves of ``examples/adasum.py``: one batch; eight times the batch by the mean at eight times the rate; and
by Adasum at the same rate.

python benchmarks/adasum.py
python benchmarks/adasum.py --write 2026-11-26
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness import arguments, report, table

ROOT = Path(__file__).resolve().parents[1]
RANKS = 8

Curves = dict[str, list[str]]


def run(ranks: int) -> Curves:
    """The losses of the example on a number of ranks, every tenth step."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / "examples" / "adasum.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"on {ranks} ranks: {done.stdout}{done.stderr}")
    curves: Curves = {}
    for name, loss in re.findall(r"^(\w+) of .*: loss (\S+)", done.stdout, flags=re.MULTILINE):
        curves.setdefault(name, []).append(loss)
    return curves


def main() -> None:
    options = arguments(__doc__ or "")
    one, many = run(1), run(RANKS)
    head = ["step", "16 rows, rate 1", "128 rows, mean, rate 8", "128 rows, Adasum, rate 1"]
    rows = [
        [str(10 * place + 10), *losses]
        for place, losses in enumerate(zip(one["mean"], many["mean"], many["adasum"], strict=True))
    ]
    report("adasum", options, table(head, rows))


if __name__ == "__main__":
    main()
