"""``whale launch``: a plan on Slurm, on Kubernetes or on this machine. Only the last is started here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Literal

import click

from whale.cli.files import write_whole
from whale.cli.options import note, verbosity_options
from whale.errors import UsageError

_FILES = {"slurm": "{}.sbatch", "k8s": "{}.yaml", "local": "{}.sh"}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--cluster", "cluster_file", required=True, metavar="FILE", help="The machines of the plan.")
@click.option("--on", "engine", required=True, type=click.Choice(list(_FILES)), help="The engine that starts it.")
@click.option("--name", metavar="NAME", help="Name of the job [the script's].")
@click.option("--python", "interpreter", default="python", metavar="FILE", help="Interpreter on the nodes [python].")
@click.option(
    "--feature",
    "features",
    multiple=True,
    metavar="TYPE=NAME",
    help="What the engine calls a device type: a feature of Slurm's nodes, or the label nvidia.com/gpu.product.",
)
@click.option("--option", "options", multiple=True, metavar="OPTION", help="A line of #SBATCH, such as --time=60.")
@click.option("--image", metavar="IMAGE", help="Container image, for k8s.")
@click.option("--claim", metavar="NAME", help="Claim of a volume for /checkpoints, for k8s.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="The file [NAME.sbatch, .yaml].")
@click.option("--dry-run", is_flag=True, help="Print the file; write and start nothing.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT [ARGUMENTS]...")
@verbosity_options
@click.pass_context
def launch(
    ctx: click.Context,
    plan_file: Path,
    cluster_file: str,
    engine: Literal["slurm", "k8s", "local"],
    name: str | None,
    interpreter: str,
    features: tuple[str, ...],
    options: tuple[str, ...],
    image: str | None,
    claim: str | None,
    output: Path | None,
    dry_run: bool,
    command: tuple[str, ...],
) -> None:
    """Write what starts a plan on Slurm or Kubernetes, with nodes in the order of its ranks; or start it here.

    SCRIPT calls whale.parallelize(model, batch, plan="PLAN"). With --on local all nodes are processes of this machine.
    """
    from whale.cli.clusters import load_cluster
    from whale.commands.launch_files import Launch, job_set, local_script, slurm_script
    from whale.ir.plan import Plan

    plan = Plan.load(plan_file)
    cluster = load_cluster(cluster_file, None)
    plan.check_cluster(cluster)
    plan.check_world(len(cluster.devices))
    for value, option, for_ in ((options, "--option", "slurm"), (image, "--image", "k8s"), (claim, "--claim", "k8s")):
        if value and engine != for_:
            raise UsageError(f"{option} is for --on {for_}")
    for option in options:
        if not option.startswith("-"):
            raise UsageError(f"--option {option}: options of sbatch begin with a dash, such as --option=--time=60")
    if not command[0] or command[0].startswith("-"):
        raise UsageError(f"{command[0]!r} is no script; give the training script, and its own arguments after it")
    for file, what in ((plan_file, "the plan"), (Path(cluster_file), "the cluster file")):
        if output is not None and output.exists() and file.exists() and output.samefile(file):
            raise UsageError(f"-o {output} is {what}; give another file")
    starts = engine == "local" and output is None and not dry_run
    if starts and not Path(command[0]).is_file():
        raise UsageError(f"{command[0]} is no file; give the training script, and its own arguments after it")
    if engine == "k8s" and image is None:
        raise UsageError("--on k8s needs --image, the container that has the script")
    named = name or re.sub(r"[^a-z0-9]+", "-", Path(command[0]).stem.lower()).strip("-") or "whale"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", named):
        raise UsageError(f"--name {named}: use letters, digits, dots, dashes and underscores")
    launch = Launch(
        name=named,
        cluster=cluster,
        command=command,
        python=interpreter,
        features=_features(features, {device.type.name for device in cluster.devices}),
        options=options,
    )
    if engine == "slurm":
        text = slurm_script(launch)
    elif engine == "k8s":
        text = job_set(launch, image=image or "", claim=claim)
    else:
        text = local_script(launch)
    if dry_run:
        click.echo(text, nl=False)
    elif starts:
        ctx.exit(subprocess.run(["bash", "-c", text], check=False).returncode)
    else:
        path = output or Path(_FILES[engine].format(named))
        write_whole(path, text)
        how = {"slurm": f"sbatch {path}", "k8s": f"kubectl apply -f {path}", "local": f"bash {path}"}[engine]
        note(f"wrote {path}: start it with {how}")


def _features(given: tuple[str, ...], types: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        type_, equals, feature = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.&|\[\]*-]+", feature):
            raise UsageError(f"--feature {text}: write TYPE=NAME, such as {min(types)}=a100")
        if type_ not in types:
            raise UsageError(f"--feature {text}: the cluster has no {type_}, but {', '.join(sorted(types))}")
        if found.setdefault(type_, feature) != feature:
            raise UsageError(f"--feature {text}: {type_} is {found[type_]} already")
    return found
