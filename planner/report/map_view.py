"""The map: devices in their nodes, coloured by stage, with their mesh position and share.

Equal nodes are drawn once. It knows a plan and a cluster, and neither times nor memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from whale.ir.cluster import Cluster
from whale.ir.plan import Plan, PlanStage
from whale.ir.ranks import write_ranks
from whale.planner.report.alike import Alike, alike
from whale.planner.report.colours import stage_colour, text_on
from whale.planner.report.labels import decision_columns, ranks_text, stages_text
from whale.planner.report.markup import Markup, element, picture, short, table

__all__ = ["map_view", "places_of", "stage_table"]

MOST_NODES = 48
MOST_DEVICES = 16
"""Devices of a node above which equal devices are drawn once."""
MOST_STAGES = 128

_WIDTH, _GAP, _TOP = 960.0, 10.0, 30.0
_BOX, _BOX_HEIGHT, _BOX_GAP = 108.0, 46.0, 5.0


@dataclass(frozen=True, kw_only=True)
class RankRole:
    """The role of one rank: its stages, and in the first of them its position along each axis and its shares.

    Attributes:
        stages: indices.
        position: such as ``("r", 1, 2)``: replica 1 of 2; ``t`` is a shard of a split.
        rows: the share of a micro-batch.
        count: rows of a micro-batch, if whole and known.
        part: the fraction of a split.
    """

    stages: tuple[int, ...] = ()
    position: tuple[tuple[str, int, int], ...] = ()
    rows: float = 1.0
    count: int | None = None
    part: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Device:
    rank: int
    type: str
    place: RankRole

    @property
    def kind(self) -> tuple[object, ...]:
        """Everything drawn except its rank and the index of its replica."""
        parts = tuple(one for one in self.place.position if one[0] == "t")
        return self.type, self.place.stages, parts, self.place.rows, self.place.part


@dataclass(frozen=True, kw_only=True)
class _Node:
    name: str
    devices: tuple[_Device, ...]


def places_of(plan: Plan, stages: Sequence[Sequence[int]]) -> Mapping[int, RankRole]:
    """Return the role of each rank in the plan; ``stages`` are the ranks of each stage if the plan has none.

    >>> from whale.ir.plan import PlanAxis
    >>> axis = PlanAxis(name="replicate", size=2, role="replicate", shares=(3, 1))
    >>> plan = Plan(world_size=2, batch=8, micro_batches=2, stages=(PlanStage(ranks=(0, 1), axes=(axis,)),))
    >>> place = places_of(plan, ())[1]
    >>> place.position, place.rows, place.count
    ((('r', 1, 2),), 0.25, 1)
    """
    found: dict[int, RankRole] = {}
    rows = plan.micro_batch_rows
    for index, stage in enumerate(plan.stages or [PlanStage(ranks=tuple(ranks)) for ranks in stages]):
        for position, rank in enumerate(stage.ranks):
            if rank in found:
                found[rank] = RankRole(stages=(*found[rank].stages, index))  # each stage has its own mesh
            else:
                found[rank] = _place(stage, index, position, rows)
    return found


def _place(stage: PlanStage, index: int, position: int, rows: int | None) -> RankRole:
    coordinates: list[tuple[str, int, int]] = []
    rows_share = part = 1.0
    stride = prod(axis.size for axis in stage.axes or ())
    for axis in stage.axes or ():
        stride //= axis.size
        at = position // stride % axis.size
        coordinates.append(("r" if axis.divides_batch else "t", at, axis.size))
        own = axis.shares[at] / sum(axis.shares) if axis.shares else 1 / axis.size
        rows_share, part = (rows_share * own, part) if axis.divides_batch else (rows_share, part * own)
    whole = round(rows_share * rows) if rows is not None and stage.axes is not None else None
    exact = whole is not None and rows is not None and abs(whole - rows_share * rows) < 1e-6
    return RankRole(
        stages=(index,),
        position=tuple(coordinates),
        rows=rows_share,
        count=whole if exact else None,
        part=part,
    )


def map_view(plan: Plan, stages: Sequence[Sequence[int]], types: Mapping[int, str], cluster: Cluster | None) -> Markup:
    """Draw the devices by node, or by type without a cluster.

    Args:
        plan: to draw.
        stages: the ranks of each stage, if the plan has none.
        types: device types by rank, if known.
        cluster: with the nodes.
    """
    places = places_of(plan, stages)
    num_stages = len(plan.stages or stages)
    nodes = _nodes(plan.world_size, places, types, cluster)
    groups, left = alike(
        nodes,
        equal=lambda node: tuple(device.kind for device in node.devices),
        similar=lambda node: (
            tuple(dict.fromkeys(device.type for device in node.devices)),
            tuple(dict.fromkeys(device.place.stages for device in node.devices)),
        ),
        weight=lambda node: len(node.devices),
        most=MOST_NODES,
    )
    drawn: list[Markup] = []
    x, y, row = 0.0, 0.0, 0.0
    for group in groups:
        boxes = _boxes_of(group.shown)
        columns = min(len(boxes), 4 if len(boxes) != 3 else 3)
        width = max(columns, 2) * (_BOX + _BOX_GAP) + _BOX_GAP + 4
        height = _TOP + -(-len(boxes) // columns) * (_BOX_HEIGHT + _BOX_GAP) + 4
        if x and x + width > _WIDTH:
            x, y, row = 0.0, y + row + _GAP, 0.0
        drawn.append(_node(group, boxes, columns, num_stages, x, y, width, height))
        x, row = x + width + _GAP, max(row, height)
    height = y + row + (22 if left else 2)
    if left:
        drawn.append(element("text", f"{left} more nodes are not drawn", x=4, y=height - 6, class_="quiet"))
    what = "nodes" if cluster is not None else "device types (give --cluster to see nodes)"
    idle = plan.world_size - len(places)
    description = (
        f"{plan.world_size} devices in {len(nodes)} {what}, {num_stages} {'stage' if num_stages == 1 else 'stages'}."
        + (f" {idle} devices have no stage." if idle else "")
    )
    return picture("map", "The plan on the cluster", description, _WIDTH, max(height, 1), *drawn)


def _nodes(
    world_size: int, places: Mapping[int, RankRole], types: Mapping[int, str], cluster: Cluster | None
) -> tuple[_Node, ...]:
    if cluster is not None:
        members = {node.name: list(node.ranks) for node in cluster.nodes}
    else:
        members = {}
        for rank in range(world_size):
            members.setdefault(types.get(rank, "devices"), []).append(rank)
    return tuple(
        _Node(
            name=name,
            devices=tuple(
                _Device(rank=rank, type=types.get(rank, ""), place=places.get(rank, RankRole())) for rank in ranks
            ),
        )
        for name, ranks in members.items()
    )


def _boxes_of(node: _Node) -> tuple[Alike[_Device], ...]:
    """The devices to draw: all, or one of each kind if there are many."""
    many = len(node.devices) > MOST_DEVICES
    groups, _ = alike(
        node.devices,
        equal=lambda device: device.kind if many else device.rank,
        similar=lambda device: (device.type, device.place.stages),
        weight=lambda device: device.place.rows * device.place.part,
        most=4 * MOST_DEVICES if many else MOST_DEVICES,
    )
    return groups


def _node(
    group: Alike[_Node],
    boxes: Sequence[Alike[_Device]],
    columns: int,
    num_stages: int,
    x: float,
    y: float,
    width: float,
    height: float,
) -> Markup:
    node, count = group.shown, len(group.members)
    names = ", ".join(short(one.name, 40) for one in group.members[:20])
    more = f" and {count - 20} more" if count > 20 else ""
    types = ", ".join(dict.fromkeys(device.type for device in node.devices))
    below = f"{len(node.devices)} devices" if types in ("", node.name) else types
    kind = "" if count == 1 else f"; {count} {'equal' if group.equal else 'similar'}"
    said = element("title", f"{names}{more}: {len(node.devices)} devices, {short(types, 100)}{kind}")
    title = short(node.name, int(width / 6.5) - (22 if count > 1 else 4))
    if count > 1:
        title += f" and {count - 1} more equal" if group.equal else f" and {count - 1} similar"
    parts = [
        element("rect", said, class_="node", x=x + 0.5, y=y + 0.5, width=width - 1, height=height - 1, rx=6),
        element("text", title, x=x + 8, y=y + 13, class_="strong"),
        element("text", short(below, int(width / 6)), x=x + 8, y=y + 25, class_="quiet"),
    ]
    one_of_many = count > 1
    for position, box in enumerate(boxes):
        left = x + _BOX_GAP + 2 + position % columns * (_BOX + _BOX_GAP)
        top = y + _TOP + position // columns * (_BOX_HEIGHT + _BOX_GAP)
        parts.append(element("g", *_device(box, num_stages, left, top, one_of_many)))
    return element("g", *parts)


def _device(box: Alike[_Device], num_stages: int, x: float, y: float, one_of_many: bool) -> Iterator[Markup]:
    place = box.shown.place
    ranks = [one.rank for one in box.members]
    yield element("title", _about(box))
    if place.stages:
        colour = stage_colour(place.stages[0], num_stages)
        ink = text_on(colour)
        yield element("rect", class_="swatch", x=x, y=y, width=_BOX, height=_BOX_HEIGHT, rx=4, fill=colour)
    else:
        ink = None
        yield element("rect", class_="unused", x=x, y=y, width=_BOX, height=_BOX_HEIGHT, rx=4)
    lines = [
        ranks_text(ranks, 11) + (" …" if one_of_many else ""),
        stages_text(place.stages) if place.stages else "unused",
        _share(place),
    ]
    if len(ranks) > 1:
        lines[0] = short(f"{len(ranks)}: {', '.join(map(str, write_ranks(ranks)))}", 16)
    for line, text in enumerate(lines):
        strong = "strong" if line == 1 else None
        yield element("text", short(text, 19), x=x + 6, y=y + 13 + 13.5 * line, class_=strong, fill=ink)


def _share(place: RankRole) -> str:
    """Shard and share, abbreviated."""
    parts = [f"t{at}/{size}" for letter, at, size in place.position if letter == "t"]
    if (
        place.part < 1
        and abs(place.part * prod(size for letter, _, size in place.position if letter == "t") - 1) > 1e-9
    ):
        parts.append(f"{place.part:.0%}")
    if place.count is not None:
        parts.append(f"{place.count} row{'' if place.count == 1 else 's'}")
    elif place.rows < 1:
        parts.append(f"{place.rows:.0%} of rows")
    return " ".join(parts)


def _about(box: Alike[_Device]) -> str:
    device, place = box.shown, box.shown.place
    words = {"r": "replica", "t": "tensor part"}
    said = [short(device.type, 60), ranks_text([one.rank for one in box.members], 100)]
    said.append(stages_text(place.stages))
    said += [f"{words[letter]} {at} of {size}" for letter, at, size in place.position]
    if place.position:
        said.append(f"{place.rows:.1%} of the rows of a micro-batch")
        said.append(f"{place.part:.1%} of what is split")
    return ", ".join(filter(None, said))


def stage_table(plan: Plan, stages: Sequence[Sequence[int]], types: Mapping[int, str]) -> Markup:
    """The stages in a table: layers, devices, mesh, and other decisions that any stage has."""
    planned = plan.stages or [PlanStage(ranks=tuple(ranks)) for ranks in stages]
    keys = [key for key, texts in plan.annotations.items() if texts[0].startswith("stage")]
    named = len(keys) == len(planned)
    decided = decision_columns(planned)
    rows = []
    for index, stage in enumerate(planned[:MOST_STAGES]):
        colour = stage_colour(index, len(planned))
        swatch = element("rect", class_="swatch", x=1, y=1, width=12, height=12, fill=colour)
        key = element("svg", swatch, class_="key", viewBox="0 0 14 14", aria_hidden="true")
        counts: dict[str, int] = {}
        for rank in stage.ranks:
            counts[types.get(rank, "device")] = counts.get(types.get(rank, "device"), 0) + 1
        rows.append(
            [
                element("span", key, f" {index}"),
                short(keys[index], 60) if named else "",
                short(", ".join(map(str, write_ranks(stage.ranks))), 60),
                short(", ".join(f"{count} {name}" for name, count in counts.items()), 60),
                _mesh(stage),
                *(column[index] for column in decided.values()),
            ]
        )
    caption = "Stages" + (f" (the first {MOST_STAGES} of {len(planned)})" if len(planned) > MOST_STAGES else "")
    return table(caption, ["stage", "from module", "ranks", "devices", "mesh and shares", *decided], rows)


def _mesh(stage: PlanStage) -> str:
    if stage.axes is None:
        return "as annotated"
    described = []
    for axis in stage.axes:
        shares = ":".join(f"{share:g}" for share in axis.shares[:16]) + (":…" if len(axis.shares) > 16 else "")
        described.append(f"{short(axis.name, 30)} {axis.size}" + (f" ({shares})" if shares else ""))
    return " x ".join(described) or "one device"
