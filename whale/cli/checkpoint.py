"""``whale checkpoint``: what a checkpoint is, and whether all of its bytes are right; loads no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from whale.cli.options import note, verbosity_options
from whale.cli.tables import text_table
from whale.errors import CheckpointError
from whale.ir.units import bytes_text

if TYPE_CHECKING:
    from whale.checkpoint.reader import Reader

__all__ = ["checkpoint", "of_newest_good"]

_Read = TypeVar("_Read")


@click.group()
def checkpoint() -> None:
    """Show what a checkpoint is, or check all of its bytes."""


@checkpoint.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, with all tensors.")
@verbosity_options
def show(checkpoint: Path, as_json: bool) -> None:
    """Show the step, the ranks, the objects and the sizes of a checkpoint.

    CHECKPOINT is a folder such as runs/a/step-00000100, or that of a run, of which the newest good one is taken.
    """

    def shown(reader: Reader) -> str:
        return json.dumps(_content(reader), indent=1) if as_json else _shown(reader)

    click.echo(of_newest_good(checkpoint, shown))


@checkpoint.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@verbosity_options
def verify(checkpoint: Path) -> None:
    """Check every byte of a checkpoint; ends with exit code 5 at the first that is damaged.

    CHECKPOINT is a folder such as runs/a/step-00000100, or that of a run, of which the newest is checked.
    """
    from whale.checkpoint.reader import Reader

    folder = _found(checkpoint)[0]
    with Reader(folder) as reader:
        click.echo(f"{folder} is good: {bytes_text(reader.verify())} of {len(reader.indexes)} ranks")


def of_newest_good(path: Path, read: Callable[[Reader], _Read]) -> _Read:
    """Read the checkpoint that an argument names, or the newest of a run's with which *read* succeeds.

    Raises:
        CheckpointError: there is none.
    """
    from whale.checkpoint.reader import Reader

    folders = _found(path)
    damaged: list[CheckpointError] = []
    for folder in folders:
        try:
            with Reader(folder) as reader:
                made = read(reader)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for why in damaged:
            note(f"a newer checkpoint is damaged, and {folder.name} is taken: {why}")
        return made
    if len(damaged) == 1:
        raise damaged[0]
    raise CheckpointError(f"{path} has no good checkpoint: {'; '.join(map(str, damaged))}")


def _found(path: Path) -> list[Path]:
    """The folders of checkpoints that an argument names, the newest first.

    Raises:
        CheckpointError: there is none.
    """
    from whale.checkpoint.folder import checkpoints_in, links

    found = checkpoints_in(path.absolute())
    if found != [path.absolute()] and path.is_dir():
        for link in links(path):
            note(f"{link} is a link, which is not followed")
    if not found:
        raise CheckpointError(f"{path} is neither a checkpoint, a folder such as step-00000100, nor has any")
    return found


def _content(reader: Reader) -> dict[str, Any]:
    manifest = reader.manifest
    return {
        "folder": str(reader.folder),
        "step": manifest.step,
        "ranks": len(reader.indexes),
        "optimizers": manifest.optimizers,
        "objects": sorted(manifest.objects),
        "versions": manifest.versions,
        "tensors": {
            str(key): {"dtype": placed[0].part.dtype, "shape": placed[0].part.shape, "parts": len(placed)}
            for key, placed in sorted(reader.parts.items())
        },
    }


def _shown(reader: Reader) -> str:
    from whale.checkpoint.format import DTYPE_BYTES

    manifest = reader.manifest
    classes = {of: f"optimizer, {kind}" for of, kind in manifest.optimizers.items()}
    names = dict.fromkeys(manifest.names, "model")
    others = dict.fromkeys(manifest.objects, "object")
    rows = []
    for of, kind in {**names, **classes, **others}.items():
        forms = [placed[0].part for key, placed in reader.parts.items() if key.of == of]
        count = sum(prod(part.shape) for part in forms)
        size = sum(prod(part.shape) * DTYPE_BYTES[part.dtype] for part in forms)
        rows.append((of, kind, len(forms), f"{count:,}", bytes_text(size)))
    ranks = f"{len(reader.indexes)} rank{'s' if len(reader.indexes) > 1 else ''}"
    title = f"{reader.folder}: step {manifest.step}, written by {ranks}"
    return f"{title}\n{text_table('', ('name', 'is', 'tensors', 'elements', 'size'), rows).strip()}"
