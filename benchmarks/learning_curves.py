"""Learning curves of ``examples/mnist.py`` on 1, 2 and 4 ranks with the same global batch.

python benchmarks/learning_curves.py                # prints the largest difference
python benchmarks/learning_curves.py --write        # and draws docs/images/learning_curves.svg
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "learning_curves.svg"
RANKS = (1, 2, 4)
PENS = {1: 'stroke="#9ec5fe" stroke-width="9"', 2: 'stroke="#0969da" stroke-width="4"', 4: 'stroke="#1f2328"'}
"""From wide and pale to thin and dark, so that equal curves stay visible."""

WIDTH, HEIGHT, LEFT, TOP = 380, 240, 60, 64
"""Size of the area of a plot, and position of the first one."""

Curves = dict[str, list[float]]


def run(ranks: int) -> Curves:
    """The losses of each network of the example on a number of ranks."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(ROOT / "examples" / "mnist.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"on {ranks} ranks: {done.stdout}{done.stderr}")
    curves: Curves = {}
    for name, loss in re.findall(r"^(\w+), step \d+: loss ([\d.]+)", done.stdout, flags=re.MULTILINE):
        curves.setdefault(name, []).append(float(loss))
    return curves


def difference(curves: dict[int, Curves]) -> float:
    """The largest between any loss and that of one rank, relative."""
    return max(
        abs(loss / one - 1)
        for of_ranks in curves.values()
        for name, losses in of_ranks.items()
        for loss, one in zip(losses, curves[1][name], strict=True)
    )


def plot(name: str, curves: dict[int, list[float]], left: int) -> list[str]:
    """One network: axes, and a line for each number of ranks."""
    steps, highest = len(curves[1]), max(map(max, curves.values()))
    lines = [f'<text x="{left}" y="{TOP - 14}" font-weight="600">{name}</text>']
    for tick in range(int(highest) + 1):
        y = TOP + HEIGHT * (1 - tick / highest)
        lines.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#d0d7de"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{tick}</text>')
    for step in range(0, steps + 1, 20):
        x = left + WIDTH * step / steps
        lines.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle" fill="#57606a">{step}</text>')
    for ranks, losses in curves.items():
        points = " ".join(
            f"{left + WIDTH * step / steps:.1f},{TOP + HEIGHT * (1 - loss / highest):.1f}"
            for step, loss in enumerate(losses)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke-linejoin="round" {PENS[ranks]}/>')
    return lines


def picture(curves: dict[int, Curves]) -> str:
    """The plots side by side, with a legend."""
    names = list(curves[1])
    width, height = LEFT + len(names) * (WIDTH + LEFT), TOP + HEIGHT + 72
    told = (
        "Cross-entropy by step of a small convolutional network and a small vision transformer on drawn digits, "
        f"trained on {', '.join(map(str, RANKS[:-1]))} and {RANKS[-1]} ranks with the same global batch of 32. The "
        f"curves lie on each other: no loss differs by more than {difference(curves):.0e} of itself."
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img" aria-labelledby="title desc" font-size="14" fill="#1f2328" '
        "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        '<title id="title">The learning curves of 1, 2 and 4 ranks coincide</title>',
        f'<desc id="desc">{told}</desc>',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="12" fill="#ffffff" stroke="#d0d7de"/>',
    ]
    for index, name in enumerate(names):
        lines += plot(name, {ranks: curves[ranks][name] for ranks in curves}, LEFT + index * (WIDTH + LEFT))
    y = height - 18
    for index, ranks in enumerate(curves):
        x = LEFT + 120 * index
        lines.append(f'<path d="M{x} {y - 5}h36" fill="none" {PENS[ranks]}/>')
        lines.append(f'<text x="{x + 44}" y="{y}">{ranks} rank{"s" if ranks > 1 else ""}</text>')
    lines.append(f'<text x="{width - LEFT}" y="{y}" text-anchor="end" fill="#57606a">loss by step</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"draw {PICTURE.relative_to(ROOT)}")
    options = parser.parse_args()
    curves = {ranks: run(ranks) for ranks in RANKS}
    print(f"largest difference from one rank: {difference(curves):.1e} of the loss")
    if options.write:
        PICTURE.write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
