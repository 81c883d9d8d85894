"""``whale profile`` without a sub-command: what is asked for becomes items to measure, and the result a table.

Loaded only when it runs, because it loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from whale import profiling
from whale.cli.clusters import load_cluster
from whale.cli.files import write_profile
from whale.cli.model_loader import LoadedModel, load_model, parse_settings
from whale.cli.options import note
from whale.cli.tables import text_table
from whale.errors import InputFileError, UsageError
from whale.graph.capture import batch_leaves
from whale.ir.cluster import DTYPES
from whale.ir.profile import LayerKind, ModelProfile
from whale.ir.strategy import RECOMPUTES
from whale.runtime.launch import initialize
from whale.runtime.store import from_first
from whale.strategies.layers import LayeredModel, layered
from whale.strategies.profile import profile_model

__all__ = ["as_text", "measure"]


def measure(
    *,
    output: Path | None,
    spec: str | None,
    settings: tuple[str, ...],
    batch_size: int | None,
    degrees: tuple[int, ...] | None,
    rows: tuple[int, ...] | None,
    cluster: str | None,
    time_limit: float,
    passes: int,
    device: str | None,
    parallel: bool,
) -> ModelProfile | None:
    """Measure on all ranks; rank 0 writes the file and returns the profile, the others return None."""
    if spec is None and (settings or batch_size or degrees or rows):
        raise UsageError("--set, --batch, --degrees and --rows say how to time a model's layers; add --model")
    before = ModelProfile.load(output) if output is not None and output.exists() else None
    described = None if cluster is None else load_cluster(cluster, before)
    loaded = None if spec is None else load_model(spec, parse_settings(settings), batch_size=batch_size)
    for assumption in () if loaded is None else loaded.assumptions:
        note(f"assumed: {assumption}")
    world = initialize(device_type=device, timeout_seconds=max(120.0, time_limit))
    places = profiling.places_of(world, described)
    make = partial(_start, output, loaded, degrees or _powers(world.size))
    start = ModelProfile.parse(
        from_first(world, "profile", lambda: make().dumps(), patience_seconds=profiling.PREPARATION_SECONDS)
    )
    items = []
    if loaded is not None:
        wanted = rows or _powers(_num_rows(loaded))
        items += profiling.layer_items(
            world,
            places,
            start,
            partial(_capture, loaded, wanted),
            loaded.model,
            loaded.batch,
            rows=wanted,
            degrees=degrees,
        )
    items += profiling.machine_items(world, places, profiling.Sizes.of(world.device))
    made, left = profiling.measure_items(
        world,
        items,
        start,
        time_limit=time_limit,
        passes=passes,
        parallel=parallel,
        write=(lambda now: None) if output is None else (lambda now: write_profile(now, output)),
        tell=note,
    )
    if world.rank != 0:
        return None
    if left:
        note(f"no time for {left} of {len(items)} measurements: {time_limit:g} s are over; run it again to go on")
    return made


def _start(output: Path | None, loaded: LoadedModel | None, degrees: tuple[int, ...]) -> ModelProfile:
    """Known results: those of the file, and the model's profile, which is captured if the file has none at these
    degrees."""
    found = ModelProfile.load(output) if output is not None and output.exists() else None
    if loaded is None:
        return found or ModelProfile(name="machines", layers=(), kinds=())
    if found is not None and found.kinds:
        known = {variant.tensor_degree for variant in found.kinds[0].variants} | {degree for degree, _ in found.refused}
        if set(degrees) <= known and found.rules == RECOMPUTES:
            return found
        degrees = tuple(sorted(known.union(degrees)))
    made = profile_model(
        loaded.model, loaded.batch, tensor_degrees=degrees, expert_degrees=degrees, name=loaded.name, rules=True
    )
    if found is None:
        return made
    if found.kinds and found.model_hash != made.model_hash:
        raise InputFileError(
            f"is the profile of another model ({found.name!r}); choose another file with -o, or remove it",
            path=str(output),
        )
    kinds = [
        kind.model_copy(update={"measured": old.measured})
        for kind, old in zip(made.kinds, found.kinds or made.kinds, strict=True)
    ]
    brought = {name: getattr(found, name) for name in ("device_types", "links", "rates")}
    return made.model_copy(update={"kinds": tuple(kinds), **brought})


def _capture(loaded: LoadedModel, rows: tuple[int, ...]) -> Mapping[int, LayeredModel]:
    return layered(loaded.model, loaded.batch, rows)


def _num_rows(loaded: LoadedModel) -> int:
    return next((x.shape[0] for x in batch_leaves(loaded.batch).values() if hasattr(x, "shape") and x.dim()), 1)


def _powers(most: int) -> tuple[int, ...]:
    """Powers of two up to a number, and the number.

    >>> _powers(6)
    (1, 2, 4, 6)
    """
    return tuple(sorted({*(2**power for power in range(most.bit_length()) if 2**power <= most), most}))


# --- the table --------------------------------------------------------------------------------------------------------


def as_text(profile: ModelProfile) -> str:
    """Measurements as tables: devices, links, and the sum of all layers."""
    parts = [_devices(profile), _links(profile), _times(profile)]
    return "\n\n".join(part for part in parts if part) or "nothing was measured"


def _devices(profile: ModelProfile) -> str:
    dtypes = [dtype for dtype in DTYPES if any(dtype in figures for figures in profile.device_types.values())]
    rows = [
        [
            name,
            _scaled(figures.get("memory_bytes"), 2**30, "GiB"),
            _scaled(figures.get("memory_bandwidth"), 1e9, "GB/s"),
            *(_scaled(figures.get(dtype), 1e12, "TFLOP/s") for dtype in dtypes),
        ]
        for name, figures in profile.device_types.items()
    ]
    return _table("devices", ["type", "memory", "memory bandwidth", *dtypes], rows)


def _links(profile: ModelProfile) -> str:
    rows = []
    for curve in profile.links:
        who = ", ".join(curve.types or sorted({curve.source, curve.target}))
        ends = [
            f"{size / rate * 1e3:.4g} ms for {_bytes(size)}"
            for size, rate in list(zip(curve.sizes, curve.bandwidths, strict=True))[:: max(1, len(curve.sizes) - 1)]
        ]
        rows.append([curve.operation, who, f"{curve.ranks}", curve.within, ", ".join(ends)])
    return _table("links", ["operation", "devices", "ranks", "within", "takes"], rows)


def _times(profile: ModelProfile) -> str:
    keys = sorted({(t.device_type, t.tensor_degree, n) for k in profile.kinds for t in k.measured for n in t.rows})
    rows = []
    for device_type, degree, count in keys:
        found = [_at(kind, device_type, degree, count) for kind in profile.chain()]
        if all(found):
            sums = (sum(times[part] for times in found if times) * 1e3 for part in range(3))
            rows.append([device_type, str(degree), str(count), *(f"{value:.4g} ms" for value in sums)])
    columns = ["device", "tensor degree", "rows", "forward", "backward", "update"]
    return _table(f"all {len(profile.layers)} layers of {profile.name}", columns, rows)


def _at(kind: LayerKind, device_type: str, degree: int, rows: int) -> tuple[float, float, float] | None:
    for times in kind.measured:
        if (times.device_type, times.tensor_degree) == (device_type, degree) and rows in times.rows:
            index = times.rows.index(rows)
            return times.forward[index], times.backward[index], times.update[index]
    return None


def _scaled(value: float | None, scale: float, unit: str) -> str:
    return "-" if not value else f"{value / scale:.4g} {unit}"


def _bytes(count: float) -> str:
    return f"{count / 2**20:g} MiB" if count >= 2**20 else f"{count / 2**10:g} KiB"


def _table(title: str, columns: list[str], rows: list[list[Any]]) -> str:
    return text_table(title, columns, rows) if rows else ""
