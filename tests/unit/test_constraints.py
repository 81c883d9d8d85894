"""Annotations as constraints of the search: what is kept, and what cannot be said of whole layers."""

from __future__ import annotations

import pytest

import whale
from tests.small_models import decoder
from whale.annotations import Annotation, module_scopes
from whale.errors import UsageError
from whale.ir.strategy import parse_strategy
from whale.planner.search import Fixed
from whale.planner.search.constraints import fixed_by

PATHS = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


def fixed(annotations: dict[str, list[str]]) -> Fixed:
    """The constraints of a decoder of four layers with these annotations."""
    model = decoder()
    whale.annotate(
        model, {key: [Annotation(strategy=parse_strategy(t)) for t in texts] for key, texts in annotations.items()}
    )
    return fixed_by(module_scopes(model), PATHS)


def test_layers_of_a_stage_stay_together_and_the_next_stage_begins_after_them() -> None:
    found = fixed({"layers.[0-1]": ["stage()"], "layers.[2-3]": ["stage()"]})
    assert found.starts == (3,)
    assert found.uncut == ((1, 3), (3, 5))
    assert found.degrees == ()


@pytest.mark.parametrize(
    ("strategies", "data", "tensor"),
    [
        (["split(4)"], None, 4),
        (["replicate(2)"], 2, None),
        (["replicate(2)", "split(4)"], 2, 4),
        (["replicate()"], None, 1),
        (["split()"], 1, None),
        (["stage(8)", "split(4)"], 2, 4),
        (["stage(8)", "replicate(8)"], 8, 1),
    ],
)
def test_degrees_are_those_that_are_written(strategies: list[str], data: int | None, tensor: int | None) -> None:
    (found,) = fixed({"layers.[1-2]": strategies}).degrees
    assert (found.first, found.last, found.data, found.tensor) == (2, 4, data, tensor)


def test_what_is_said_of_the_model_holds_for_all_layers_but_those_told_otherwise() -> None:
    found = fixed({"": ["split(2)"], "head": ["split(4)"]}).degrees
    assert [(one.first, one.last, one.tensor) for one in found] == [(0, 5, 2), (5, 6, 4)]


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"layers.1.up": ["split(2)"]}, "lies within the layer layers.1"),
        ({"layers.[0,2]": ["stage()"]}, "do not follow each other"),
        ({"layers.0": ["stage(4)"]}, "say how they work together"),
        ({"layers.0": ["stage(4)", "split(3)"]}, "say how they work together"),
        ({"layers.0": ["replicate(2)", "stage()"]}, "replicas inside of stages only"),
        ({"layers.0": ["split(2)", "replicate(2)"]}, "split inside of replicate"),
    ],
)
def test_what_is_no_constraint_is_refused(annotations: dict[str, list[str]], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fixed(annotations)


def test_a_choice_of_devices_is_refused() -> None:
    model = decoder()
    whale.annotate(model, {"": [whale.cluster(type="A100"), whale.replicate()]})
    with pytest.raises(UsageError, match="leave cluster"):
        fixed_by(module_scopes(model), PATHS)


EXPERTS = [(), ("layers.0.up",), ("layers.1.up",), ("layers.2.up",), ("layers.3.up",), ()]


def of_experts(annotations: dict[str, list[str]]) -> list[tuple[int, int, int | None, int | None, int | None]]:
    """The degrees that annotations fix of a decoder, of whose layers a module counts as experts."""
    model = decoder()
    whale.annotate(
        model, {key: [Annotation(strategy=parse_strategy(t)) for t in texts] for key, texts in annotations.items()}
    )
    found = fixed_by(module_scopes(model), PATHS, EXPERTS)
    return [(one.first, one.last, one.data, one.tensor, one.expert) for one in found.degrees]


def test_experts_that_are_split_fix_the_expert_degree() -> None:
    assert of_experts({"layers.*.up": ["split(4)"]}) == [(1, 5, None, 1, 4)]
    assert of_experts({"": ["replicate()"], "layers.*.up": ["split()"]}) == [
        (0, 1, None, 1, None),
        (1, 5, 1, 1, None),
        (5, 6, None, 1, None),
    ]
    nested = {"": ["replicate(2)", "replicate()"], "layers.*.up": ["replicate(2)", "split()"]}
    assert of_experts(nested)[1] == (1, 5, 2, 1, None)


def test_experts_of_layers_that_are_annotated_without_them_are_whole() -> None:
    assert of_experts({"layers.[0-1]": ["replicate(4)"]}) == [(1, 3, 4, None, 1)]


def test_experts_in_layers_that_are_split_are_refused() -> None:
    with pytest.raises(UsageError, match="where all else is replicated"):
        of_experts({"": ["split(2)"], "layers.*.up": ["split(4)"]})
