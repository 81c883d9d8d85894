"""``whale export``: the weights of a checkpoint as files of Hugging Face; loads no torch, starts no process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from whale.cli.checkpoint import of_newest_good
from whale.cli.options import note, verbosity_options
from whale.errors import UsageError
from whale.ir.units import bytes_text, parse_quantity

if TYPE_CHECKING:
    from whale.checkpoint.hugging_face import Exported
    from whale.checkpoint.reader import Reader


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR", required=True, help="Folder for the files."
)
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="Limit of a file, such as 500MB [5GB].")
@verbosity_options
def export(checkpoint: Path, output: Path, max_shard_size: str) -> None:
    """Write the weights of a checkpoint as model.safetensors, or as several files with an index.

    CHECKPOINT is a folder such as runs/a/step-00000100, or that of a run, of which the newest good one is taken.
    No model and no other process is needed, and at most one tensor is in memory.
    """
    from whale.checkpoint.hugging_face import export as written

    try:
        most = int(parse_quantity(max_shard_size, "memory"))
    except ValueError as error:
        raise UsageError(f"--max-shard-size: {error}") from None

    def exported(reader: Reader) -> tuple[Exported, int]:
        return written(reader, output, most), reader.manifest.step

    made, step = of_newest_good(checkpoint, exported)
    for file in made.files:
        click.echo(file)
    note(f"wrote {made.num_tensors} tensors, {bytes_text(made.bytes)}, of step {step}")
