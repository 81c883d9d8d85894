"""``whale doctor``: what people paste into issues. It changes nothing, and what is missing is reported."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

import whale
from whale.cli.clusters import load_cluster_and_profile
from whale.cli.machine import device_links, host_rates, network_adapters
from whale.cli.options import note, verbosity_options
from whale.errors import InfeasibleError, UsageError
from whale.ir.units import bytes_text

FILE = click.Path(dir_okay=False, path_type=Path)
_PACKAGES = ("torch", "numpy", "networkx", "pydantic", "safetensors", "transformers")
_LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


@click.command()
@click.option("--cluster", "cluster_file", metavar="FILE", help="Show what this cluster file says, not this machine.")
@click.option("--profile", "profile_file", metavar="FILE", help="A profile with device types and curves.")
@click.option(
    "--gpu", "gpu", is_flag=True, help="Check this machine's GPUs with steps of every kind: some ten minutes."
)
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Write the report of --gpu to this file, to send it.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@verbosity_options
def doctor(cluster_file: str | None, profile_file: str | None, gpu: bool, output: Path | None, as_json: bool) -> None:
    """Report Python, torch, devices and their links, communication backends, cores and memory.

    With --cluster: the nodes, devices and links of a cluster file, where their figures are from, and what the planner
    makes of them.

    With --gpu: parity of every kind of plan, copies of parameters, waits, failures, process groups and speed on this
    machine's GPUs, each part in processes of its own and under a deadline. Exits with 1 if a part fails, and with 4 on
    a machine without a GPU.
    """
    if output is not None and not gpu:
        raise UsageError("-o is for --gpu: it writes that report to a file")
    if gpu:
        _check_gpus(output, as_json)
        return
    cluster, profile = load_cluster_and_profile(cluster_file, profile_file)
    if cluster is not None:
        from whale.cli.cluster_report import cluster_data, cluster_text

        data = {"file": cluster_file, **cluster_data(cluster, profile)}
        click.echo(json.dumps(data, indent=2) if as_json else cluster_text(data))
        return
    report = examine()
    click.echo(json.dumps(report, indent=2, sort_keys=True) if as_json else _as_text(report))


EXIT_FAILED = 1


def _check_gpus(output: Path | None, as_json: bool) -> None:
    """Run all parts on as many ranks as there are GPUs, or, if they share one, on two."""
    from whale.cli.files import refuse_unwritable, write_whole
    from whale.cli.gpu import PARTS, gpu_text, run_parts
    from whale.runtime.launch import SHARE_GPU

    if output is not None:
        refuse_unwritable(output)
    machine = examine()
    if not machine["devices"]:
        why = f": torch {machine['torch']['version']} sees none" if machine["torch"] else ": torch does not import"
        raise InfeasibleError(
            f"this machine has no CUDA device to check{why}; whale doctor without --gpu shows the rest"
        )
    ranks = len(machine["devices"])
    if os.environ.get(SHARE_GPU) == "1":
        ranks = max(2, ranks)
    report = {"machine": machine, "parts": run_parts(PARTS, ranks, "cuda", note)}
    text = json.dumps(report, indent=2, sort_keys=True, default=str)
    if output is not None:
        write_whole(output, text + "\n")
    click.echo(text if as_json else gpu_text(report))
    if not all(part["passed"] for part in report["parts"].values()):
        raise click.exceptions.Exit(EXIT_FAILED)


def examine() -> dict[str, Any]:
    """Look at this process and this machine. Sizes are in bytes.

    Returns:
        A value that JSON can hold, with the keys ``whale``, ``python``, ``platform``, ``packages``, ``torch``,
        ``devices``, ``links`` (between CUDA devices), ``host`` (bytes per second, see `host_rates`), ``network``,
        ``backends``, ``cores``, ``memory_bytes``, ``environment`` and ``problems`` (sentences, empty when all is well).
    """
    problems: list[str] = []
    report: dict[str, Any] = {
        "whale": whale.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": {"usable": _usable_cores(), "present": os.cpu_count()},
        "memory_bytes": _memory(),
        "environment": {name: os.environ[name] for name in _LAUNCH_VARIABLES if name in os.environ},
        "torch": None,
        "devices": [],
        "links": [],
        "host": {},
        "network": network_adapters(),
        "backends": {},
        "problems": problems,
    }
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        problems.append(f"torch does not import: {error}")
        return report
    report["torch"] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "num_threads": torch.get_num_threads(),
        "distributed": dist.is_available(),
    }
    if dist.is_available():
        report["backends"] = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    else:
        problems.append("this build of torch has no torch.distributed: only one process can train")
    report["devices"] = _cuda_devices(problems)
    report["links"] = device_links(len(report["devices"]), problems)
    report["host"] = host_rates(len(report["devices"]), problems)
    if report["devices"] and not report["backends"].get("nccl", False):
        problems.append("there are CUDA devices, but this build of torch has no NCCL")
    return report


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> dict[str, int | None]:
    """Total and available bytes of the host, as Linux tells; None where it does not."""
    found: dict[str, int | None] = {"total": None, "available": None}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                key, _, rest = line.partition(":")
                if key in ("MemTotal", "MemAvailable"):
                    found["total" if key == "MemTotal" else "available"] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return found


def _cuda_devices(problems: list[str]) -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "index": index,
                    "name": properties.name,
                    "memory_bytes": properties.total_memory,
                    "compute_capability": f"{properties.major}.{properties.minor}",
                }
            )
    except RuntimeError as error:
        problems.append(f"the CUDA devices cannot be read: {error}")
    return devices


def _as_text(report: dict[str, Any]) -> str:
    cores, memory, torch_report = report["cores"], report["memory_bytes"], report["torch"]
    rows = [
        ("whale", report["whale"]),
        ("python", f"{report['python']} ({report['executable']})"),
        ("platform", report["platform"]),
        *((name, version or "not installed") for name, version in report["packages"].items()),
    ]
    if torch_report is not None:
        rows.append(("threads of torch", str(torch_report["num_threads"])))
        if torch_report.get("rocm"):
            rows.append(("ROCm of torch", torch_report["rocm"]))  # whose devices are cuda to torch
        else:
            rows.append(("CUDA of torch", torch_report["cuda"] or "none (a CPU build)"))
    rows += [
        (f"backend {name}", "available" if there else "not available") for name, there in report["backends"].items()
    ]
    rows += [
        (f"device cuda:{device['index']}", f"{device['name']}, {bytes_text(device['memory_bytes'])}")
        for device in report["devices"]
    ]
    rows += [(f"link {first}-{second}", how) for (first, second), how in map(_link, report["links"])]
    rows += [(f"network {adapter['name']}", _speed(adapter)) for adapter in report["network"]]
    if not report["devices"]:
        rows.append(("devices", "no accelerator; the CPU is used"))
    rows.append(("cores", f"{cores['usable']} usable of {cores['present']}"))
    if memory["total"] is not None and memory["available"] is not None:
        rows.append(("memory", f"{bytes_text(memory['total'])}, {bytes_text(memory['available'])} available"))
    rows += _host_rows(report["host"])
    rows += sorted(report["environment"].items())
    rows += [("problem", problem) for problem in report["problems"]]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _host_rows(host: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows of what was measured of the memory, with the words of a cluster file."""
    rows = []
    if host.get("bandwidth"):
        threads = f"{host['threads']} thread{'s' if host['threads'] != 1 else ''}"
        rows.append(("memory bandwidth", f"{host['bandwidth'] / 1e9:.3g} GB/s with {threads} of torch"))
    for device in host.get("devices", ()):
        ways = f"{device['to_device'] / 1e9:.3g} GB/s to it, {device['from_device'] / 1e9:.3g} GB/s from it"
        rows.append((f"host and cuda:{device['index']}", ways))
    return rows


def _link(link: dict[str, Any]) -> tuple[list[int], str]:
    nvlinks = link["nvlinks"]
    how = "peer access" if link["peer_access"] else "no peer access: through the host"
    return link["devices"], f"{nvlinks} x NVLink, {how}" if nvlinks else how


def _speed(adapter: dict[str, Any]) -> str:
    speed = adapter["bits_per_second"]
    return f"{adapter['kind']}, {'speed not told' if speed is None else f'{speed / 1e9:g} Gbit/s'}"
