"""Profiles that others measured: the layouts of Sailor and of Metis, read strictly into a `ModelProfile`.

Both are folders of JSON files whose meaning is in their names and in the code that reads them; ``docs/profiles.md``
describes what is taken from them. Files are untrusted: what is not as described ends in an ``InputFileError`` with
file and line. This file knows what the numbers mean, not what they are used for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite, log10
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from whale.errors import InputFileError, UsageError
from whale.ir.document import Document, read_document
from whale.ir.profile import Affine, Amount, LayerKind, LayerVariant, LinkCurve, MeasuredTimes, ModelProfile, Saved

__all__ = ["import_metis", "import_sailor"]

_MAX_FILES = 1_000
_MAX_LAYERS = 10_000
_FORWARD_SHARE = 1 / 3
"""Fraction of the forward in forward and backward together, if only their sum was measured: a backward has two products
for each of the forward's."""
_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


Tell = Callable[[str], None]
"""Receives what is left out and why, in a sentence."""


def ignore(text: str) -> None:
    """Discard a message."""


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A value of a file that knows where it stands, so that what is wrong with it is said with file and line."""

    document: Document
    path: tuple[str | int, ...] = ()

    @property
    def value(self) -> Any:
        value: Any = self.document.value
        for part in self.path:
            value = value[part]
        return value

    def error(self, message: str) -> InputFileError:
        where = ".".join(map(str, self.path))
        return self.document.error(f"{where}: {message}" if where else message, self.path)

    def table(self) -> dict[str, _Value]:
        if not isinstance(self.value, dict):
            raise self.error("must be a table of names and values")
        return {key: _Value(document=self.document, path=(*self.path, key)) for key in self.value}

    def items(self, length: int | None = None) -> list[_Value]:
        if not isinstance(self.value, list) or (length is not None and len(self.value) != length):
            raise self.error(f"must be a list{'' if length is None else f' of {length} values'}")
        return [_Value(document=self.document, path=(*self.path, index)) for index in range(len(self.value))]

    def at(self, *keys: str) -> _Value:
        found = self
        for key in keys:
            table = found.table()
            if key not in table:
                raise found.lacking(key)
            found = table[key]
        return found

    def lacking(self, key: str) -> InputFileError:
        return self.error(f"the key {key!r} is missing; there is {', '.join(list(self.table())[:8]) or 'nothing'}")

    def number(self) -> float:
        if not self._is_number() or self.value < 0:
            raise self.error("must be a number that is not negative")
        return float(self.value)

    def real(self) -> float:
        if not self._is_number():
            raise self.error("must be a number")
        return float(self.value)

    def whole(self) -> int:
        number = self.number()
        if number != int(number):
            raise self.error("must be a whole number")
        return int(number)

    def by_count(self) -> dict[int, _Value]:
        """A table whose keys are whole numbers from 1, such as micro-batch sizes, in their order."""
        table = self.table()
        for key, value in table.items():
            if not re.fullmatch(r"[1-9][0-9]{0,6}", key):
                raise value.error("the key must be a whole number from 1")
        return {int(key): table[key] for key in sorted(table, key=int)}

    def _is_number(self) -> bool:
        value = self.value
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and abs(value) < 1e30


def _read(path: Path) -> _Value:
    return _Value(document=read_document(path))


def _files(folder: Path, pattern: str) -> list[tuple[Path, re.Match[str]]]:
    """The files of a folder whose whole names match, in the order of their names."""
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise InputFileError(f"cannot be read: {error.strerror}", path=str(folder)) from error
    found = [(folder / name, match) for name in names if (match := re.fullmatch(pattern, name))]
    if len(found) > _MAX_FILES:
        raise InputFileError(f"holds more than {_MAX_FILES} profiles", path=str(folder))
    return found


def _fold(kinds: list[LayerKind]) -> tuple[tuple[int, ...], tuple[LayerKind, ...]]:
    """Positions of layers in the distinct kinds, which are equal up to names."""
    positions: dict[str, int] = {}
    different: list[LayerKind] = []
    layers = []
    for kind in kinds:
        key = kind.model_copy(update={"name": ""}).model_dump_json()
        if key not in positions:
            positions[key] = len(different)
            different.append(kind)
        layers.append(positions[key])
    return tuple(layers), tuple(different)


def _made(folder: Path, **figures: Any) -> ModelProfile:
    """A profile; what only its own rules find, such as a memory of no bytes, is the folder's fault."""
    try:
        return ModelProfile(**figures)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputFileError(
            f"{'.'.join(map(str, first['loc'])) or 'the profile'}: {first['msg']}", path=str(folder)
        ) from error


# --- Sailor -----------------------------------------------------------------------------------------------------------


def import_sailor(folder: str | PathLike[str], *, tell: Tell = ignore) -> ModelProfile:
    """Read a folder laid out as Sailor's artifact.

    It holds ``profiles/MODEL_GPU.json``, ``{micro-batch: {tensor degree: {layer: [forward, backward, update]}}}`` in
    seconds; ``model.json``, ``{model: {tensor degree: {layer: {params_floats, act_output_floats, act_mem_floats}}}}``,
    numbers of a device for a micro-batch of one; ``training.json`` with ``model``, ``num_all_layers`` and
    ``sequence_length``; ``nodes.json`` with ``zone`` and, for each GPU, ``gpus_per_node`` and ``mem_per_gpu`` in bytes;
    ``intra_node_bandwidths.json``, ``{gpu: {devices: curve}}``; ``inter_node_bandwidths.json``, ``{zone: {gpu:
    {devices: {zone: {gpu: {devices: curve}}}}}}``, of which the zone of ``nodes.json`` is taken. A curve is
    ``[coefficients, maximum]``: a polynomial in log2 of the size in MB (10^6 bytes) for GB/s, and bytes per second.

    Times of a tensor degree above 1 hold the collectives of the group. An update is that of the whole model, repeated
    for every layer in the files; here it is shared among the layers by their parameters.

    What the files do not have for all layers is left out: a tensor degree of one device type of which ``model.json``
    has no sizes, a size or a time of a degree that lacks layers.

    Args:
        folder: with the files.
        tell: called with each thing that is left out, and why.

    Raises:
        InputFileError: with file and line, whatever is wrong with a file; or nothing is left.
    """
    root = Path(folder)
    training = _read(root / "training.json")
    model = training.at("model").value
    if not isinstance(model, str) or not re.fullmatch(r"[\w.+ -]{1,200}", model):
        raise training.at("model").error("must be a name")
    num_layers = training.at("num_all_layers").whole()
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise training.at("num_all_layers").error(f"must lie between 1 and {_MAX_LAYERS}")
    sizes = _with_all_layers(_read(root / "model.json").at(model).by_count(), num_layers, tell)
    profiles = {
        match[1]: _read(path) for path, match in _files(root / "profiles", rf"{re.escape(model)}_([^/]{{1,100}})\.json")
    }
    if not profiles:
        raise InputFileError(
            f"has no profile {model}_GPU.json of the model in training.json", path=str(root / "profiles")
        )
    times = {gpu: _sailor_times(gpu, file, sizes, num_layers, tell) for gpu, file in profiles.items()}
    if not any(times.values()):
        raise InputFileError(
            f"has no times of a tensor degree of which model.json has sizes: {', '.join(map(str, sizes))}",
            path=str(root / "profiles"),
        )
    parameters = _whole_model(sizes, num_layers)
    kinds = [_sailor_layer(str(layer), sizes, times, parameters) for layer in range(num_layers)]
    nodes = _read(root / "nodes.json")
    layers, different = _fold(kinds)
    return _made(
        root,
        name=model,
        layers=layers,
        kinds=different,
        row_tokens=training.at("sequence_length").whole() or 1,
        device_types=_sailor_device_types(nodes),
        links=(
            *_sailor_links_within(_read(root / "intra_node_bandwidths.json")),
            *_sailor_links_between(_read(root / "inter_node_bandwidths.json"), nodes.at("zone").value),
        ),
    )


def _whole_model(sizes: Mapping[int, _Value], num_layers: int) -> dict[int, float]:
    """Parameters of all layers on a device, by tensor degree."""
    return {
        degree: sum(table.at(str(layer), "params_floats").number() for layer in range(num_layers))
        for degree, table in sizes.items()
    }


def _with_all_layers(by_degree: Mapping[int, _Value], num_layers: int, tell: Tell) -> dict[int, _Value]:
    """The tables of a file, by tensor degree, that have every layer; at least one has.

    Raises:
        InputFileError: none has.
    """
    found, lacking = {}, None
    for degree, table in by_degree.items():
        missing = next((layer for layer in range(num_layers) if str(layer) not in table.table()), None)
        if missing is None:
            found[degree] = table
        else:
            lacking = table.lacking(str(missing))
            tell(f"left out: {lacking}")
    if lacking is not None and not found:
        raise lacking
    return found


def _sailor_times(
    gpu: str, file: _Value, sizes: Mapping[int, _Value], num_layers: int, tell: Tell
) -> dict[int, dict[int, _Value]]:
    """A device type's tables by tensor degree and rows: of degrees with sizes those that have all layers."""
    found: dict[int, dict[int, _Value]] = {}
    unknown: set[int] = set()
    for rows, degrees in file.by_count().items():
        for degree, table in degrees.by_count().items():
            missing = next((layer for layer in range(num_layers) if str(layer) not in table.table()), None)
            if degree not in sizes:
                unknown.add(degree)
            elif missing is not None:
                tell(f"left out: {table.lacking(str(missing))}")
            else:
                found.setdefault(degree, {})[rows] = table
    for degree in sorted(unknown):
        tell(
            f"left out: tensor degree {degree} of {gpu}, of which model.json has no sizes (it has "
            f"{', '.join(map(str, sizes))})"
        )
    return found


def _sailor_layer(
    layer: str,
    sizes: Mapping[int, _Value],
    times: Mapping[str, Mapping[int, Mapping[int, _Value]]],
    parameters: Mapping[int, float],
) -> LayerKind:
    variants = {}
    for degree, table in sizes.items():
        figures = table.at(layer)
        kept = Amount(elements=Affine(0, figures.at("act_mem_floats").number()))
        variants[degree] = LayerVariant(
            tensor_degree=degree,
            parameters=figures.at("params_floats").number(),
            saved=(Saved(origin="profile", size=kept),),
        )
    smallest = min(sizes)
    output = sizes[smallest].at(layer, "act_output_floats").number()
    measured = []
    for gpu, by_degree in times.items():
        for degree, by_rows in sorted(by_degree.items()):
            taken = [[value.number() for value in table.at(layer).items(3)] for table in by_rows.values()]
            forwards, backwards, updates = zip(*taken, strict=True)
            share = variants[degree].parameters / (parameters[degree] or 1)
            measured.append(
                MeasuredTimes(
                    device_type=gpu,
                    tensor_degree=degree,
                    rows=tuple(by_rows),
                    forward=forwards,
                    backward=backwards,
                    update=tuple(update * share for update in updates),
                    includes_communication=degree > 1,
                )
            )
    whole = variants.get(1)
    return LayerKind(
        name=layer,
        variants=tuple(variants.values()),
        measured=tuple(measured),
        output=Amount(elements=Affine(0, output)),
        parameters=whole.parameters if whole else None,
        activations=whole.saved[0].size if whole else None,
    )


def _sailor_device_types(nodes: _Value) -> dict[str, dict[str, float]]:
    types = {name: entry for name, entry in nodes.table().items() if name != "zone"}
    return {
        name: {
            "memory_bytes": float(entry.at("mem_per_gpu").whole()),
            "devices_per_node": float(entry.at("gpus_per_node").whole()),
        }
        for name, entry in types.items()
    }


def _sailor_links_within(file: _Value) -> list[LinkCurve]:
    return [
        LinkCurve(source=gpu, target=gpu, devices=devices, within="node", **_sailor_curve(curve))
        for gpu, by_devices in file.table().items()
        for devices, curve in by_devices.by_count().items()
    ]


def _sailor_links_between(file: _Value, zone: object) -> list[LinkCurve]:
    if not isinstance(zone, str):
        raise file.error("the zone in nodes.json must be a name of a zone in this file")
    return [
        LinkCurve(
            source=source,
            target=target,
            devices=devices,
            target_devices=target_devices if target_devices != devices else None,
            within="nodes",
            **_sailor_curve(curve),
        )
        for source, by_devices in file.at(zone).table().items()
        for devices, zones in by_devices.by_count().items()
        for target, by_target_devices in zones.at(zone).table().items()
        for target_devices, curve in by_target_devices.by_count().items()
    ]


def _sailor_curve(curve: _Value) -> dict[str, Any]:
    coefficients, maximum = curve.items(2)
    given = [value.real() for value in coefficients.items()]
    if not 1 <= len(given) <= 10:
        raise coefficients.error("must have between 1 and 10 coefficients")
    # log2(bytes / 10^6) = (log10(bytes) - 6) / log10(2): put this line into the polynomial, by Horner's rule.
    slope, offset = 1 / log10(2), -6 / log10(2)
    composed = [0.0]
    for coefficient in given:
        product = [slope * one for one in composed] + [0.0]
        for index, one in enumerate(composed):
            product[index + 1] += offset * one
        product[-1] += coefficient
        composed = product
    return {"coefficients": tuple(composed[1:]), "maximum": maximum.number()}


# --- Metis ------------------------------------------------------------------------------------------------------------


def import_metis(
    folder: str | PathLike[str], *, precision: str = "float32", row_tokens: int = 1, tell: Tell = ignore
) -> ModelProfile:
    """Read a folder of Metis's profiles, ``DeviceType.GPU_tpDEGREE_bsROWS.json``.

    A file holds ``model`` (``model_name``, ``num_layers``, ``parameters.parameters_per_layer_bytes``, which are whole
    whatever the degree), ``execution_time`` (``layer_compute_total_ms`` for each layer, forward and backward together;
    ``optimizer_time_ms`` of the model) and ``execution_memory`` (``layer_memory_total_mb`` for each layer: all that it
    takes). A third of a layer's time is taken as its forward; the optimizer's time is shared among the layers by their
    parameters; what memory grows by with a row, at degree 1 on the first device type that has two sizes, is taken as
    activations.

    Args:
        folder: with the files.
        precision: of the numbers, which the files do not say: bytes of parameters are turned into elements by it.
        row_tokens: tokens in a row, which the files do not say either.
        tell: called with each thing that is left out, and why.

    Raises:
        InputFileError: with file and line, whatever is wrong with a file.
    """
    if precision not in _ELEMENT_BYTES:
        raise UsageError(f"unknown number type {precision!r}; use one of {', '.join(_ELEMENT_BYTES)}")
    root = Path(folder)
    found = _files(root, r"DeviceType\.(.{1,100})_tp([1-9][0-9]{0,4})_bs([1-9][0-9]{0,6})\.json")
    if not found:
        raise InputFileError("has no file DeviceType.GPU_tpDEGREE_bsROWS.json", path=str(root))
    files = {(match[1], int(match[2]), int(match[3])): _read(path) for path, match in found}
    first = next(iter(files.values()))
    name = first.at("model", "model_name").value
    if not isinstance(name, str) or not 1 <= len(name) <= 200:
        raise first.at("model", "model_name").error("must be a name")
    num_layers = len(first.at("execution_time", "layer_compute_total_ms").items())
    if not 1 <= num_layers <= _MAX_LAYERS:
        raise first.at("execution_time", "layer_compute_total_ms").error(f"must have 1 to {_MAX_LAYERS} layers")
    for file in files.values():
        if file.at("model", "model_name").value != name:
            raise file.at("model", "model_name").error(f"is not {name!r}, the model of {first.document.source}")
    sizes = _numbers(first.at("model", "parameters", "parameters_per_layer_bytes"), num_layers)
    activations = _metis_activations(files, num_layers, tell)
    times = {key: _metis_times(file, num_layers, sizes) for key, file in sorted(files.items())}
    kinds = [
        LayerKind(
            name=str(layer),
            measured=_metis_measured(times, layer),
            parameters=sizes[layer] / _ELEMENT_BYTES[precision],
            activations=None if activations is None else Amount(bytes=Affine(0, activations[layer])),
        )
        for layer in range(num_layers)
    ]
    layers, different = _fold(kinds)
    return _made(root, name=name, layers=layers, kinds=different, precision=precision, row_tokens=row_tokens)


def _numbers(value: _Value, length: int) -> list[float]:
    return [item.number() for item in value.items(length)]


def _metis_times(file: _Value, num_layers: int, sizes: list[float]) -> list[tuple[float, float]]:
    """Seconds of forward and backward together, and of the update, for each layer."""
    execution = file.at("execution_time")
    computing = _numbers(execution.at("layer_compute_total_ms"), num_layers)
    update = execution.at("optimizer_time_ms").number()
    whole = sum(sizes) or 1
    return [(time / 1e3, update / 1e3 * size / whole) for time, size in zip(computing, sizes, strict=True)]


def _metis_measured(
    times: Mapping[tuple[str, int, int], list[tuple[float, float]]], layer: int
) -> tuple[MeasuredTimes, ...]:
    series: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for (gpu, degree, rows), by_layer in times.items():
        series.setdefault((gpu, degree), {})[rows] = by_layer[layer]
    return tuple(
        MeasuredTimes(
            device_type=gpu,
            tensor_degree=degree,
            rows=tuple(by_rows),
            forward=tuple(both * _FORWARD_SHARE for both, _ in by_rows.values()),
            backward=tuple(both * (1 - _FORWARD_SHARE) for both, _ in by_rows.values()),
            update=tuple(update for _, update in by_rows.values()),
            includes_communication=degree > 1,
        )
        for (gpu, degree), by_rows in series.items()
    )


def _metis_activations(files: Mapping[tuple[str, int, int], _Value], num_layers: int, tell: Tell) -> list[float] | None:
    """Bytes that each layer's memory grows by with a row; None where the files do not tell.

    Metis's own samples have files whose list of memories is shorter than their layers: these are passed over.
    """
    known: dict[str, list[tuple[int, list[float]]]] = {}
    for (gpu, degree, rows), file in sorted(files.items()):
        memories = file.at("execution_memory", "layer_memory_total_mb")
        length = len(memories.items())
        if length != num_layers:
            tell(f"left out: {memories.error(f'has {length} values for {num_layers} layers')}")
        elif degree == 1:
            known.setdefault(gpu, []).append((rows, _numbers(memories, num_layers)))
    points = next((points for points in known.values() if len(points) > 1), None)
    if points is None:
        tell("left out: activations, since no device type has memories of two sizes at tensor degree 1")
        return None
    (few, least), (many, most) = points[0], points[-1]
    return [max(0.0, large - small) * 2**20 / (many - few) for small, large in zip(least, most, strict=True)]
