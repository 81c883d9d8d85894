"""``whale trace``: one trace for Perfetto of those that the ranks exported; loads no torch.

Traces are read and merged by ``whale.commands``; this file says what was done to the clocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whale.cli.files import refuse_same, refuse_unwritable, write_pieces
from whale.cli.options import note, verbosity_options
from whale.cli.simulate import read_workload

if TYPE_CHECKING:
    from whale.commands.merged_trace import Clock

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("traces", type=_FILE, nargs=-1, required=True, metavar="TRACE...")
@click.option("-o", "--output", type=_FILE, metavar="FILE", required=True, help="Write the merged trace to this file.")
@click.option("--plan", "plan_file", type=_FILE, metavar="FILE", help="Show the predicted step of this plan beside.")
@verbosity_options
def trace(traces: tuple[Path, ...], output: Path, plan_file: Path | None) -> None:
    """Merge what torch.profiler recorded on each rank into one trace, with the predicted step beside it.

    TRACE is a file that export_chrome_trace wrote on a rank, plain or .gz. Give those of all ranks, of the same steps:
    clocks of hosts are aligned by the sums over all ranks in them.
    """
    from whale.commands.merged_trace import align, check_ranks, merged
    from whale.commands.rank_traces import read_ranks
    from whale.planner.simulation.simulate import simulate

    refuse_same({"-o": output}, {"--plan": plan_file, **{f"TRACE {path.name}": path for path in traces}})
    refuse_unwritable(output)
    timeline = simulate(read_workload(plan_file)) if plan_file is not None else None
    found = read_ranks(traces)
    if timeline is not None:
        check_ranks(found, timeline)
    clocks = align(found)
    _say_clocks(clocks)
    write_pieces(output, merged(found, clocks, timeline))
    note(f"wrote {output}: open it at https://ui.perfetto.dev")


def _say_clocks(clocks: Mapping[int, Clock]) -> None:
    """Say whose clock was moved, and where nothing is known."""
    unknown = [rank for rank, clock in clocks.items() if not clock.num_sums]
    if len(clocks) > 1 and unknown:
        note(
            f"clocks of ranks {unknown} are as their hosts have them: the profiles have no sum over all ranks to "
            "align them by; on GPUs, profile with ProfilerActivity.CUDA"
        )
    for rank, clock in clocks.items():
        if clock.shift:
            note(
                f"clock of rank {rank}: moved by {clock.shift / 1e6:+.3f} ms, "
                + (f"within {clock.leeway / 1e6:.3f} ms" if clock.leeway >= 0 else "though it drifts")
                + f", by {clock.num_sums} sums over all ranks"
            )
