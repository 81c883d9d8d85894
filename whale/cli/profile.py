"""``whale profile``: measure machines and a model's layers on them, or take what others measured.

The measuring is ``whale.profiling``, the reading ``whale.planner.profile_import``; this file asks for them and shows
what they return.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whale.cli.files import write_profile
from whale.cli.options import AT_LEAST_1, PRECISION_HELP, note, verbosity_options
from whale.errors import UsageError

if TYPE_CHECKING:
    pass


def _counts(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers from 1, with commas between them."""
    if value is None:
        return None
    parts = value.split(",")
    if not all(part.strip().isdecimal() and 1 <= int(part) <= 10**6 for part in parts):
        raise click.BadParameter(f"{value!r}: write whole numbers from 1, such as 1,2,4", ctx, parameter)
    return tuple(sorted({int(part) for part in parts}))


_MODEL_OPTIONS = (
    click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the model; repeatable."),
    click.option("--batch", "batch_size", type=AT_LEAST_1, metavar="N", help="Samples in the global batch."),
    click.option("--degrees", callback=_counts, metavar="N,...", help="Tensor degrees."),
)


def _model_options(function: Callable[..., object]) -> Callable[..., object]:
    for option in reversed(_MODEL_OPTIONS):
        function = option(function)
    return function


@click.group(invoke_without_command=True)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Output file; existing results stay."
)
@click.option("--model", "spec", metavar="SPEC", help="Time its layers: file.py:callable, or hf:<model_type>.")
@_model_options
@click.option("--rows", callback=_counts, metavar="N,...", help="Rows of micro-batches [powers of 2 up to the batch].")
@click.option("--cluster", metavar="FILE", help="A cluster file that names the devices: rank r is device r.")
@click.option("--time-limit", type=click.FloatRange(min=0.1), default=120.0, metavar="SECONDS", help="[120]")
@click.option("--passes", type=AT_LEAST_1, default=1, metavar="N", help="Number of passes; medians count.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="cpu or cuda [cuda, if available].")
@click.option("--parallel", is_flag=True, help="Measure device types concurrently.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile instead of a table.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of a profile and exit.")
@verbosity_options
@click.pass_context
def profile(ctx: click.Context, as_json: bool, schema: bool, **given: Any) -> None:
    """Measure devices and links and, with --model, a model's layers on each type of device.

    On several ranks: torchrun --nproc-per-node 2 -m whale profile -o profile.json

    With -o, what FILE has is not measured again, so that a run that was interrupted, or had too little time, goes on
    when it is started again.
    """
    if ctx.invoked_subcommand is not None:
        return
    if schema:
        from whale.ir.profile import ModelProfile

        click.echo(json.dumps(ModelProfile.model_json_schema(), indent=2, sort_keys=True))
        return
    from whale.cli.profile_measure import measure

    made = measure(**given)
    if made is not None:
        from whale.cli.profile_measure import as_text

        click.echo(made.dumps() if as_json else as_text(made), nl=not as_json)


@profile.command("model")
@click.option("--model", "spec", required=True, metavar="SPEC", help="file.py:callable, or hf:<model_type>.")
@_model_options
@click.option("--context-degrees", callback=_counts, metavar="N,...", help="Degrees over which rows are cut [none].")
@click.option("--precision", metavar="NAME", help=PRECISION_HELP)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the profile to this file.")
@click.option("--kernels", is_flag=True, help="List the kernels of every layer too.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile instead of a table.")
@verbosity_options
def model_(
    spec: str,
    settings: tuple[str, ...],
    batch_size: int | None,
    degrees: tuple[int, ...] | None,
    context_degrees: tuple[int, ...] | None,
    precision: str | None,
    output: Path | None,
    kernels: bool,
    as_json: bool,
) -> None:
    """Show what a model computes, saves and communicates, layer by layer. It measures and allocates nothing."""
    from whale.cli.assumptions import assumptions_text, autocast_of, in_precision, said_of_model
    from whale.cli.model_loader import load_model, parse_settings
    from whale.cli.profile_text import format_profile
    from whale.graph.capture import batch_rows
    from whale.strategies.profile import profile_model

    loaded = load_model(spec, parse_settings(settings), batch_size=batch_size, device="meta")
    autocast = autocast_of(precision)
    precision = in_precision(loaded, precision)
    degrees = degrees or (1, 2, 4, 8)
    made = profile_model(
        loaded.model,
        loaded.batch,
        tensor_degrees=degrees,
        expert_degrees=degrees,
        context_degrees=context_degrees or (),
        name=loaded.name,
        precision=autocast,
        rules=True,
    )
    if output is not None:
        write_profile(made, output)
    if as_json:
        click.echo(made.dumps(), nl=False)
        return
    said = assumptions_text(said_of_model(loaded, precision, rows=batch_rows(loaded.batch) or 0))
    click.echo("\n\n".join(filter(None, [format_profile(made, kernels=kernels), said])))


@profile.command("import")
@click.argument("layout", metavar="LAYOUT", type=click.Choice(["sailor", "metis"]))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the profile to this file.")
@click.option("--precision", metavar="TYPE", help="metis: dtype of the model [float32].")
@click.option("--row-tokens", type=AT_LEAST_1, metavar="N", help="metis: tokens in a row of the batch [1].")
@verbosity_options
def import_(layout: str, folder: Path, output: Path | None, precision: str | None, row_tokens: int | None) -> None:
    """Read the profiles of other planners: LAYOUT is sailor or metis.

    Without -o the profile is printed.
    """
    from whale.planner.profile_import import import_metis, import_sailor

    if layout == "sailor":
        if precision is not None or row_tokens is not None:
            raise UsageError("--precision and --row-tokens are for metis: the files of sailor contain them")
        made = import_sailor(folder, tell=note)
    else:
        for given, what, option in (
            (precision, "float32, the number type", "--precision TYPE"),
            (row_tokens, "1 token in a row", "--row-tokens N"),
        ):
            if given is None:
                note(f"assumed: {what}, which the files do not contain; {option} changes it")
        made = import_metis(folder, precision=precision or "float32", row_tokens=row_tokens or 1, tell=note)
    if output is None:
        click.echo(made.dumps(), nl=False)
        return
    write_profile(made, output)
    types = sorted({times.device_type for kind in made.kinds for times in kind.measured})
    note(f"wrote {output}: {made.name}, {len(made.layers)} layers on {', '.join(types)}")
