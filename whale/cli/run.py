"""``whale run``: a training script on this machine and others, started again with the machines that are there."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import click

from whale.cli.options import note, verbosity_options
from whale.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--elastic", metavar="MIN:MAX", help="Least and greatest number of machines [1:1].")
@click.option("--processes", type=click.IntRange(1, 4096), metavar="N", help="Ranks of this machine [its GPUs, or 1].")
@click.option("--endpoint", metavar="HOST:PORT", help="Where the machines meet, the same on each [this machine alone].")
@click.option("--head/--no-head", default=None, help="Whether this machine has the meeting point [by its address].")
@click.option(
    "--machine", "number", type=click.IntRange(0), metavar="I", help="Number of this machine, 0 at HOST [by address]."
)
@click.option("--job", default="whale", metavar="NAME", help="Name of the job at this endpoint [whale].")
@click.option(
    "--max-restarts", type=click.IntRange(0, 10**6), default=10, metavar="N", help="After failures of ranks [10]."
)
@click.option("--address", metavar="HOST", help="Address of this machine for the others [its host name].")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@verbosity_options
@click.pass_context
def run(
    ctx: click.Context,
    elastic: str | None,
    processes: int | None,
    endpoint: str | None,
    head: bool | None,
    number: int | None,
    job: str,
    max_restarts: int,
    address: str | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run a training script, and again with the machines that are there whenever one is lost or comes.

    Give the same command on each machine, or with --machine its number, for a plan of all of them. The script searches
    a plan (plan="auto"), loads its newest checkpoint and goes on. A rank that ends with exit code 2, 3 or 4 ends the
    job: no restart would help.
    """
    machines = _machines(elastic)
    if not script.is_file():
        raise UsageError(f"{script} is no file; give the training script, and its own arguments after it")
    if endpoint is None and machines[1] > 1:
        raise UsageError(
            f"--elastic {elastic}: give --endpoint HOST:PORT, the same on every machine, HOST being the one that is to "
            "stay"
        )
    if endpoint is not None and not re.fullmatch(r"[^\s:]+:\d{1,5}", endpoint):
        raise UsageError(f"--endpoint {endpoint}: write HOST:PORT, such as node0:29400")
    if number is not None and (machines[0] != machines[1] or endpoint is None or number >= machines[1]):
        raise UsageError(
            f"--machine {number}: machines with numbers are all there: give their number, --elastic N, and --endpoint"
        )
    from torch.distributed.elastic.multiprocessing import SignalException

    from whale.elastic import Agent

    def tell(text: str) -> None:
        now = time.time()
        note(f"whale run: {time.strftime('%H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d} {text}")

    agent = Agent(
        machines=machines,
        processes=processes or _num_devices(),
        endpoint=endpoint or "",
        hosts=head,
        number=number,
        job=job,
        max_restarts=max_restarts,
        local_address=address,
        tell=tell,
    )
    try:
        agent.run([str(script), *arguments])
    except SignalException as caught:
        number = int(caught.sigval)
        note(f"whale run: {signal.Signals(number).name} ended the ranks of this machine")
        ctx.exit(128 + number)


def _machines(text: str | None) -> tuple[int, int]:
    """The numbers of ``MIN:MAX``.

    >>> _machines("3:8"), _machines("2"), _machines(None)
    ((3, 8), (2, 2), (1, 1))
    """
    least, colon, most = (text or "1").partition(":")
    numbers = [least, most if colon else least]
    if not all(number.isdecimal() and len(number) <= 6 for number in numbers):
        raise UsageError(f"--elastic {text}: write the least and the greatest number of machines, such as 3:8")
    found = int(numbers[0]), int(numbers[1])
    if not 1 <= found[0] <= found[1]:
        raise UsageError(f"--elastic {text}: the least number is at least 1, and at most the greatest")
    return found


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() or 1
