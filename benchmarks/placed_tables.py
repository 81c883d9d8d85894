"""Plans for a DLRM whose tables hold nearly all parameters, on four A100 and four T4: predicted steps.

    python benchmarks/placed_tables.py --write 2026-11-28

Twelve tables of 40 to 40 million rows of 64 with sparse gradients, 8 look-ups in each for each row of the batch, and
the dense part of ``examples/dlrm.py``. Nothing is run: plans are compiled, and their steps predicted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import report, table
from torch import nn

import whale

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from dlrm import Dense

BATCH, LOOK_UPS, DIM, NUMBERS = 8192, 8, 64, 13
ROWS = (
    40_000_000,
    30_000_000,
    20_000_000,
    12_000_000,
    8_000_000,
    4_000_000,
    2_000_000,
    500_000,
    50_000,
    5_000,
    400,
    40,
)

CLUSTER = """
[links]
inter_node = {bandwidth = "25 Gbit/s", latency = "20 us"}
[[nodes]]
devices = 4
device = "A100-SXM4-80GB"
[[nodes]]
devices = 4
device = "T4"
"""


class Clicks(nn.Module):
    """``ids`` are [rows, tables, look-ups]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for rows in ROWS)
        self.dense = Dense(len(ROWS), DIM, NUMBERS)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.dense(numbers, [t(ids[:, i]) for i, t in enumerate(self.tables)], clicked)
        return loss


def build(batch_size: int = BATCH, places: str = "") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and a batch; with *places*, a cluster file, under the annotations of `whale.place_tables` for it."""
    model = Clicks()
    batch = {
        "numbers": torch.zeros(batch_size, NUMBERS),
        "ids": torch.zeros(batch_size, len(ROWS), LOOK_UPS, dtype=torch.long),
        "clicked": torch.zeros(batch_size),
    }
    if places:
        whale.annotate(model, whale.place_tables(model, batch, places))
    return model, batch


def told(*arguments: str) -> Any:
    """Output of a command of Whale, which it prints as JSON."""
    command = [sys.executable, "-m", "whale", *arguments, "--batch", str(BATCH), "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def ranks_of(stage: Any) -> list[int]:
    """The ranks of a stage, of which ranges are text."""
    ends = [list(map(int, str(rank).split("-"))) for rank in stage["ranks"]]
    return [rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)]


def is_chain(choice: Any) -> bool:
    """Whether no device has two stages, as those of placed tables do."""
    ranks = [rank for stage in choice["stages"] for rank in ranks_of(stage)]
    return len(set(ranks)) == len(ranks)


def row(name: str, choice: Any) -> list[str]:
    stages = [f"{one['data']} x {one['tensor']} on {', '.join(map(str, one['ranks']))}" for one in choice["stages"]]
    memory, seconds = choice["memory_bytes"], choice["step_seconds"]
    return [name, "; ".join(stages), f"{memory / 2**30:.1f} GiB", f"{1e3 * seconds:.2f} ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="DATE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = f"{folder}/cluster.toml"
        Path(cluster).write_text(CLUSTER)
        given = ("--model", f"{__file__}:build", "--cluster", cluster)
        found = [one for one in told("search", *given, "--time-limit", "60")["choices"] if one["compiled"]]
        everywhere = told("plan", *given, "--set", f"places={cluster}")["prediction"]["step_seconds"]
    rows = [
        row("the best chain of stages", min(filter(is_chain, found), key=lambda one: float(one["step_seconds"]))),
        ["`place_tables` on all eight devices", "", "", f"{1e3 * everywhere:.2f} ms"],
        row("what the search finds", found[0]),
    ]
    report(
        "placed_tables", options, table(["plan", "stages: replicas x parts on ranks", "fullest device", "step"], rows)
    )


if __name__ == "__main__":
    main()
