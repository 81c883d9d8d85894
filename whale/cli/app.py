"""The root of the command line: its options, and the one place where an exception becomes a message and an exit code.

A ``WhaleError`` is shown as one message; its traceback only with ``-v``, which every verb takes. Anything else that
escapes is a fault of ours, and says so. A verb is a module of this package; it is registered here and loads what it
needs when it runs.
"""

from __future__ import annotations

import traceback
from typing import Any

import click

import whale
from whale.cli.allocate import allocate
from whale.cli.checkpoint import checkpoint
from whale.cli.doctor import doctor
from whale.cli.estimate import estimate
from whale.cli.explain import diff, explain
from whale.cli.export import export
from whale.cli.launch import launch
from whale.cli.plan import plan
from whale.cli.profile import profile
from whale.cli.report import report
from whale.cli.run import run
from whale.cli.search import search
from whale.cli.simulate import simulate
from whale.cli.trace import trace
from whale.cli.verify import verify
from whale.errors import WhaleError
from whale.runtime.ending import tell_launcher

EXIT_FAULT = 1
EXIT_INTERRUPTED = 130


class WhaleGroup(click.Group):
    """A group of verbs that ends every failure with one message on stderr and the exit code of its kind."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; translate what it raises."""
        try:
            return super().invoke(ctx)
        except WhaleError as error:
            _show(ctx, error, f"whale: error: {error}")
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("whale: interrupted", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except (click.exceptions.Exit, click.Abort, click.ClickException, OSError) as error:
            if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                _show(ctx, error, f"whale: error: {error}")
                ctx.exit(EXIT_FAULT)
            raise  # click knows what to do with its own, and with a closed pipe
        except Exception as error:
            _show(
                ctx,
                error,
                f"whale: internal error: {type(error).__name__}: {error}\n"
                "This is a bug in Whale: please report it, with what 'whale doctor' and this command with -v print.",
            )
            ctx.exit(EXIT_FAULT)


def _show(ctx: click.Context, error: BaseException, message: str) -> None:
    """Print the message, last on the screen, after the traceback where ``-v`` asked for it."""
    if ctx.find_root().meta.get("whale.verbosity", 0) > 0:
        click.echo("".join(traceback.format_exception(error)), err=True)
    click.echo(message, err=True)
    if failure := tell_launcher(error, message):
        click.echo(f"whale: the launcher could not be notified: {failure}", err=True)


@click.group(cls=WhaleGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(whale.__version__, prog_name="whale")
def app() -> None:
    """Annotate a local PyTorch model in a few lines and train it in parallel.

    Results go to stdout (--json for their machine form), notes and errors to stderr.

    Exit codes: 0 done, 1 a fault of ours, 2 usage, 3 a bad input file, 4 infeasible,
    5 a damaged checkpoint, 6 a worker failed, 130 interrupted, 143 terminated.
    """


app.add_command(allocate)
app.add_command(checkpoint)
app.add_command(doctor)
app.add_command(diff)
app.add_command(estimate)
app.add_command(explain)
app.add_command(export)
app.add_command(launch)
app.add_command(plan)
app.add_command(profile)
app.add_command(run)
app.add_command(search)
app.add_command(report)
app.add_command(simulate)
app.add_command(trace)
app.add_command(verify)
