"""The command line: ``python -m benchmarks.testbed run FILE -- COMMAND...``, ``show``, ``clean``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import click

from whale.errors import WhaleError

from . import network
from .bed import RankFailed, Testbed, TimedOut
from .bed import clean as remove_leftovers
from .description import Description

EXIT_TIMED_OUT = 124
EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def app() -> None:
    """Run a command on a cluster of mixed devices that this machine emulates. Needs Linux, and root.

    Exit codes: that of the first rank that failed, 2 usage, 3 a bad file, 124 timed out, 130/143 interrupted.
    """


@app.command()
@click.argument("file")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--timeout", type=float, metavar="SECONDS", help="Kill all ranks after that time.")
@click.option("-q", "--quiet", is_flag=True, help="Show only what rank 0 writes to stdout, and failures.")
def run(file: str, command: tuple[str, ...], timeout: float | None, quiet: bool) -> None:
    """Bring up the devices of FILE, run COMMAND on each as one rank, tear down."""
    with Testbed(Description.load(file)) as testbed:
        done = testbed.run(command, timeout_seconds=timeout, show=not quiet)
    if quiet:
        click.echo(done.outputs[0], nl=False)


@app.command()
@click.argument("file")
@click.option("--cluster", is_flag=True, help="Print it as a Whale cluster file, for `whale plan` and parallelize.")
@click.option("--commands", is_flag=True, help="Print the commands that make its network.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write there, and not to stdout.")
def show(file: str, cluster: bool, commands: bool, output: str | None) -> None:
    """Print the devices of FILE, without touching the machine."""
    description = Description.load(file)
    if cluster:
        text = description.cluster_file()
    elif commands:
        made = network.make("whale-testbed", description.node_links)
        text = "\n".join(" ".join(command) for command in made) + "\n"
    else:
        text = _table(description)
    if output:
        Path(output).write_text(text, encoding="utf-8")
    else:
        click.echo(text, nl=False)


@app.command()
def clean() -> None:
    """Remove what testbeds left behind that were killed with SIGKILL."""
    for name in remove_leftovers():
        click.echo(f"removed {name}")


def _table(description: Description) -> str:
    lines = ["rank  node  device            cores  memory     link"]
    for device in description.devices:
        link = description.node_links[device.node]
        rate = "none" if link is None else f"{link.bandwidth * 8 / 1e6:.10g} Mbit/s"
        if link is not None and link.latency:
            rate += f", {link.latency * 1e6:.10g} us"
        memory = f"{device.memory_bytes / 2**20:.5g} MiB"
        lines.append(f"{device.rank:<5} {device.node:<5} {device.type_name:<17} {device.cores:<6g} {memory:<10} {rate}")
    return "\n".join(lines) + f"\nsum of quotas: {description.cores:g} cores\n"


def main() -> int:
    """Run the command line; a failure ends in one message, with the last lines of the rank that failed."""
    warnings.showwarning = lambda message, *_: click.echo(f"testbed: warning: {message}", err=True)  # type: ignore[assignment]
    try:
        app.main(prog_name="python -m benchmarks.testbed", standalone_mode=False)
    except (RankFailed, TimedOut) as error:
        click.echo(f"testbed: {error}", err=True)
        return error.rank_exit_code if isinstance(error, RankFailed) else EXIT_TIMED_OUT
    except WhaleError as error:
        click.echo(f"testbed: error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("testbed: interrupted", err=True)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
