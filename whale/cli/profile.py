"""``whale profile``: measure machines and a model's layers on them, or take what others measured.

The measuring is ``whale.profiling``, the reading ``whale.planner.profile_import``; this file asks for them and shows
what they return.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

import click

from whale.cli.options import note, verbosity_options
from whale.errors import UsageError

if TYPE_CHECKING:
    from whale.ir.profile import ModelProfile


@click.group(invoke_without_command=True)
@click.option("--schema", is_flag=True, help="Print the JSON schema of a profile, and stop.")
@verbosity_options
@click.pass_context
def profile(ctx: click.Context, schema: bool) -> None:
    """Measure machines and models, or import what others measured."""
    if schema:
        from whale.ir.profile import ModelProfile

        click.echo(json.dumps(ModelProfile.model_json_schema(), indent=2, sort_keys=True))
        ctx.exit()


@profile.command("import")
@click.argument("layout", metavar="LAYOUT", type=click.Choice(["sailor", "metis"]))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the profile there.")
@click.option("--precision", metavar="TYPE", help="metis: the number type of the model [float32].")
@click.option("--row-tokens", type=click.IntRange(min=1), metavar="N", help="metis: tokens in a row of the batch [1].")
@verbosity_options
def import_(layout: str, folder: Path, output: Path | None, precision: str | None, row_tokens: int | None) -> None:
    """Read the profiles of other planners: LAYOUT is sailor or metis.

    Without -o the profile is printed.
    """
    from whale.planner.profile_import import import_metis, import_sailor

    if layout == "sailor":
        if precision is not None or row_tokens is not None:
            raise UsageError("--precision and --row-tokens are for metis: the files of sailor say them")
        made = import_sailor(folder)
    else:
        made = import_metis(folder, precision=precision or "float32", row_tokens=row_tokens or 1)
    if output is None:
        click.echo(made.dumps(), nl=False)
        return
    write_profile(made, output)
    types = sorted({times.device_type for kind in made.kinds for times in kind.measured})
    note(f"wrote {output}: {made.name}, {len(made.layers)} layers on {', '.join(types)}")


def write_profile(made: ModelProfile, path: Path) -> None:
    """Put the profile there at once: who reads the file at any time finds the old one or the new one, whole."""
    if path.suffix.lower() != ".json":
        raise UsageError(f"-o {path}: a profile is a JSON file; give a name that ends with .json")
    try:
        with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
            file.write(made.dumps())
        os.chmod(file.name, 0o666 & ~_umask())
        os.replace(file.name, path)
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
