"""Annotations are inert alone, and found by a capture; their keys follow the rules of the contract."""

import contextvars
import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.traceback import preserve_node_meta

import whale
from whale.annotations import (
    NODE_KEY,
    Annotation,
    enter_module,
    get_default_strategy,
    module_scopes,
    recording,
)
from whale.errors import AnnotationError
from whale.ir.strategy import ScopePath, Strategy, decode_scopes, region_of


@pytest.fixture(autouse=True)
def no_default_strategy() -> Iterator[None]:
    whale.set_default_strategy(None)
    yield
    whale.set_default_strategy(None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(4, 4)
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attn(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def printed(scopes: dict[str, ScopePath]) -> dict[str, list[str]]:
    return {path: [str(scope) for scope in path_scopes] for path, path_scopes in scopes.items()}


def captured(model: nn.Module, *inputs: torch.Tensor) -> list[tuple[str, list[str]]]:
    """Trace *model* as a capture would, and list each operator with the scopes on its node."""
    with ExitStack() as stack:
        for path, scopes in module_scopes(model).items():
            module = model.get_submodule(path)
            original = module.forward

            def forward(*args: Any, _original: Any = original, _scopes: ScopePath = scopes, **kwargs: Any) -> Any:
                with enter_module(_scopes):
                    return _original(*args, **kwargs)

            module.forward = forward
            stack.callback(module.__dict__.pop, "forward")
        stack.enter_context(preserve_node_meta())
        stack.enter_context(recording())
        program = torch.export.export(model, inputs, strict=False)
    found = []
    for node in program.graph.nodes:
        if node.op == "call_function":
            encoded = node.meta.get("custom", {}).get(NODE_KEY, "[]")
            found.append((node.target.__name__.split(".")[0], [str(scope) for scope in decode_scopes(encoded)]))
    return found


# --- the surface ------------------------------------------------------------------------------------------------------


def test_importing_annotations_does_not_load_torch() -> None:
    code = "import sys, whale.annotations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_the_annotations_print_as_written() -> None:
    made = [whale.replicate(), whale.split(4), whale.stage(2), whale.cluster("average", 2), whale.cluster(name="node3")]
    assert [str(each) for each in made] == [
        "replicate()",
        "split(4)",
        "stage(2)",
        "cluster('average', 2)",
        "cluster(name='node3')",
    ]


@pytest.mark.parametrize("make", [whale.replicate, whale.split, whale.stage])
@pytest.mark.parametrize("degree", [0, -2, 1.5, "2", True])
def test_a_degree_that_is_no_positive_integer_is_refused(make: Any, degree: object) -> None:
    with pytest.raises(AnnotationError, match="positive integer"):
        make(degree)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, "one choice"),
        (("all",), {"type": "A100"}, "one choice"),
        (("column", 2), {}, "unknown layout"),
        (("row",), {}, "positive integer"),
        ((3,), {}, "a list of ranks"),
        (([],), {}, "empty"),
        (([0, "1"],), {}, "integers"),
        (([0], 2), {}, "takes no number"),
        ((None, 2), {"type": "A100"}, "takes no number"),
        ((), {"type": ""}, "not empty"),
    ],
)
def test_a_cluster_that_chooses_nothing_clear_is_refused(arguments: Any, keywords: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        whale.cluster(*arguments, **keywords)


def test_an_unknown_option_of_cluster_is_refused() -> None:
    with pytest.raises(AnnotationError, match="kind.*type"):
        whale.cluster(kind="A100")  # type: ignore[call-arg]


def test_the_default_strategy_is_remembered_and_forgotten() -> None:
    assert get_default_strategy() is None
    whale.set_default_strategy(whale.replicate(2))
    assert get_default_strategy() == Strategy(kind="replicate", degree=2)
    whale.set_default_strategy(None)
    assert get_default_strategy() is None


@pytest.mark.parametrize("strategy", [whale.stage(), whale.cluster("all"), "replicate"])
def test_only_replicate_and_split_can_be_the_default(strategy: Any) -> None:
    with pytest.raises(AnnotationError, match="default strategy"):
        whale.set_default_strategy(strategy)


# --- inert when alone -------------------------------------------------------------------------------------------------


def test_an_annotated_model_runs_and_saves_as_before() -> None:
    torch.manual_seed(0)
    plain = Model()
    annotated = copy.deepcopy(plain)
    whale.annotate(annotated, {"layers.*": [whale.stage(2), whale.split()], "": whale.replicate()})
    x = torch.randn(3, 4)
    assert torch.equal(annotated(x), plain(x))
    assert list(annotated.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in annotated.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in annotated.named_buffers()] == []
    assert repr(annotated) == repr(plain)


def test_a_scope_outside_a_capture_does_nothing() -> None:
    before = contextvars.copy_context()
    with whale.stage(), whale.stage(), whale.split(2):
        pass
    assert dict(contextvars.copy_context().items()) == dict(before.items())


def test_a_scope_lets_exceptions_through() -> None:
    with pytest.raises(KeyError), recording(), whale.split(2):
        raise KeyError("mine")


def test_copies_and_pickles_keep_the_annotation_and_need_nothing_of_whale() -> None:
    model = whale.split(2)(nn.Linear(2, 2))
    assert printed(module_scopes(copy.deepcopy(model))) == {"": ["split(2) of ."]}
    data = pickle.dumps(model)
    assert b"whale.annotations" not in data
    assert b"whale.ir" not in data
    assert printed(module_scopes(pickle.loads(data))) == {"": ["split(2) of ."]}


def test_the_compiler_of_torch_traces_through_a_scope_without_a_break() -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with whale.split(2):
                return self.linear(x)

    model, x = Scoped(), torch.randn(2, 4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


# --- marks on modules -------------------------------------------------------------------------------------------------


def test_a_strategy_applied_to_a_module_marks_and_returns_it() -> None:
    model = Model()
    assert whale.split(4)(model.head) is model.head
    assert printed(module_scopes(model)) == {"head": ["split(4) of head"]}


@pytest.mark.parametrize("target", [None, torch.zeros(1), lambda x: x])
def test_a_strategy_applied_to_anything_else_is_refused(target: Any) -> None:
    with pytest.raises(AnnotationError, match=r"split\(2\).*not a torch.nn.Module"):
        whale.split(2)(target)


def test_marking_again_replaces() -> None:
    model = whale.split(4)(whale.replicate()(nn.Linear(2, 2)))
    assert printed(module_scopes(model)) == {"": ["split(4) of ."]}


def test_the_whole_model_is_a_region_that_is_not_the_unannotated_rest() -> None:
    model = Model()
    whale.annotate(model, {"": whale.split()})
    (scope,) = module_scopes(model)[""]
    assert scope.region != region_of(())


def test_modules_under_one_stage_key_are_one_stage_and_each_split_module_is_a_region() -> None:
    model = Model()
    whale.annotate(model, {"layers.[0-1]": whale.stage(), "layers.[2-3]": whale.stage(), "layers.*.mlp": whale.split()})
    scopes = printed(module_scopes(model))
    assert scopes["layers.0"] == scopes["layers.1"] == ["stage() of layers.[0-1]"]
    assert scopes["layers.2"] == scopes["layers.3"] == ["stage() of layers.[2-3]"]
    assert scopes["layers.0.mlp"] == ["split() of layers.0.mlp"]
    assert scopes["layers.3.mlp"] == ["split() of layers.3.mlp"]


def test_a_list_nests_from_outer_to_inner_in_regions_of_different_names() -> None:
    model = Model()
    whale.annotate(model, {"layers.[0-3]": [whale.stage(8), whale.replicate(2), whale.split(4)]})
    assert printed(module_scopes(model))["layers.2"] == [
        "stage(8) of layers.[0-3]",
        "replicate(2) of layers.2#1",
        "split(4) of layers.2",
    ]


def test_the_more_specific_key_wins() -> None:
    model = Model()
    whale.annotate(model, {"layers.*": whale.replicate(), "layers.[0-2]": whale.split(2), "layers.1": whale.split(4)})
    assert [scope[0] for path, scope in printed(module_scopes(model)).items()] == [
        "split(2) of layers.0",
        "split(4) of layers.1",
        "split(2) of layers.2",
        "replicate() of layers.3",
    ]


def test_keys_that_tie_are_refused_and_nothing_is_annotated() -> None:
    model = Model()
    with pytest.raises(AnnotationError, match="neither is more specific"):
        whale.annotate(model, {"head": whale.split(), "layers.[0-2]": whale.stage(), "layers.[1-3]": whale.stage()})
    assert module_scopes(model) == {}


def test_a_key_on_a_container_without_forward_reaches_its_children() -> None:
    model = Model()
    whale.annotate(model, {"layers": whale.stage(2), "layers.3": whale.split()})
    scopes = printed(module_scopes(model))
    assert scopes["layers.0"] == scopes["layers.2"] == ["stage(2) of layers"]
    assert scopes["layers.3"] == ["split() of layers.3"]


def test_annotating_again_replaces_the_mapping_and_keeps_the_models_own_marks() -> None:
    model = Model()
    whale.split(2)(model.head)
    whale.annotate(model, {"layers.0": whale.split(), "embed": whale.split()})
    whale.annotate(model, {"embed": whale.replicate()})
    assert printed(module_scopes(model)) == {"embed": ["replicate() of embed"], "head": ["split(2) of head"]}
    whale.annotate(model, {"head": whale.replicate()})
    assert printed(module_scopes(model)) == {"head": ["replicate() of head"]}


def test_one_stage_key_on_two_sub_models_is_two_stages() -> None:
    pair = nn.ModuleDict({"encoder": Model(), "decoder": Model()})
    whale.annotate(pair["encoder"], {"layers.*": whale.stage()})
    whale.annotate(pair["decoder"], {"layers.*": whale.stage()})
    scopes = printed(module_scopes(pair))
    assert scopes["encoder.layers.0"] == scopes["encoder.layers.3"] == ["stage() of encoder.layers.*"]
    assert scopes["decoder.layers.0"] == ["stage() of decoder.layers.*"]
    assert printed(module_scopes(pair["encoder"]))["layers.0"] == ["stage() of layers.*"]


def test_a_sub_model_keeps_one_stage_of_the_whole_models_key() -> None:
    pair = nn.ModuleDict({"encoder": Model()})
    whale.annotate(pair, {"encoder.layers.*": whale.stage()})
    scopes = printed(module_scopes(pair["encoder"]))
    assert scopes["layers.0"] == scopes["layers.1"]


def test_a_module_at_two_paths_is_found_by_either_and_listed_once() -> None:
    model = nn.Module()
    model.a = model.b = nn.Linear(2, 2)
    whale.annotate(model, {"b": whale.split()})
    assert printed(module_scopes(model)) == {"a": ["split() of a"]}


def test_a_key_that_matches_nothing_shows_near_misses_and_children() -> None:
    with pytest.raises(AnnotationError, match=r"'layer.0'.*the model has: embed, head, layers.*'layers.0'"):
        whale.annotate(Model(), {"layer.0": whale.split()})


def test_a_key_of_a_parameter_points_to_its_module() -> None:
    with pytest.raises(AnnotationError, match=r"parameter 'head.weight'; annotate its module 'head'"):
        whale.annotate(Model(), {"head.weight": whale.split()})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"head": "split"}, "no strategy"),
        ({"head": whale.split}, "no strategy"),
        ({"head": []}, "empty list"),
        ({"head": [whale.stage(), whale.stage()]}, "'head'.*cannot contain a stage"),
        ({"head": [whale.split(), whale.stage()]}, "'head'.*cannot be cut into stages"),
        ({3: whale.split()}, "strings"),
        ([("head", whale.split())], "a dict"),
    ],
)
def test_a_mapping_with_a_wrong_part_is_refused(mapping: Any, message: str) -> None:
    with pytest.raises(AnnotationError, match=message):
        whale.annotate(Model(), mapping)


def test_annotate_is_for_modules() -> None:
    with pytest.raises(AnnotationError, match=r"not a torch.nn.Module"):
        whale.annotate("model", {})  # type: ignore[arg-type]


# --- what a capture sees ----------------------------------------------------------------------------------------------


class Inline(nn.Module):
    """Annotated inside forward: a scope entered once per layer, one nested, and one object used again within itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            with whale.stage(2):
                x = layer(x)
                with whale.split(2):
                    x = x.relu()
        again = whale.replicate()
        with again, again:
            x = x.neg()
        return x.abs()


def test_each_entry_of_a_scope_is_a_region_of_its_own() -> None:
    assert captured(Inline(), torch.ones(2, 4)) == [
        ("linear", ["stage(2) of stage#0"]),
        ("relu", ["stage(2) of stage#0", "split(2) of split#0"]),
        ("linear", ["stage(2) of stage#1"]),
        ("relu", ["stage(2) of stage#1", "split(2) of split#1"]),
        ("neg", ["replicate() of replicate#0", "replicate() of replicate#1"]),
        ("abs", []),
    ]


def test_two_captures_give_the_same_regions() -> None:
    model = Inline()
    assert captured(model, torch.ones(2, 4)) == captured(model, torch.ones(2, 4))


def test_an_inner_key_replaces_the_outer_one_on_the_nodes() -> None:
    model = Model()
    whale.annotate(model, {"": whale.replicate(), "head": whale.split(), "layers.0": [whale.stage(), whale.split(2)]})
    found = captured(model, torch.ones(2, 4))
    assert found[0] == ("linear", ["replicate() of ."])
    assert found[1] == ("linear", ["stage() of layers.0", "split(2) of layers.0"])
    assert found[5] == ("linear", ["replicate() of ."])
    assert found[-1] == ("linear", ["split() of head"])


def test_a_with_scope_nests_in_its_module_and_an_annotated_child_takes_the_modules_place() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with whale.replicate(2):
                return self.child(x.relu())

    model = nn.Sequential(Outer())
    whale.annotate(model, {"0": whale.stage(4), "0.child": whale.split(2)})
    assert captured(model, torch.ones(2, 4)) == [
        ("relu", ["stage(4) of 0", "replicate(2) of replicate#0"]),
        ("linear", ["replicate(2) of replicate#0", "split(2) of 0.child"]),
    ]


def test_a_module_called_twice_is_one_region() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child(self.child(x))

    model = Twice()
    whale.annotate(model, {"child": whale.split(2)})
    assert captured(model, torch.ones(2, 4)) == [("linear", ["split(2) of child"])] * 2


def test_a_stage_entered_in_a_stage_is_refused_while_recording() -> None:
    with pytest.raises(AnnotationError, match="cannot contain a stage"), recording(), whale.stage(4), whale.stage(2):
        pass


def test_a_stage_key_inside_a_with_stage_is_refused_while_recording() -> None:
    model = whale.stage()(nn.Linear(2, 2))
    entered = enter_module(module_scopes(model)[""])
    with pytest.raises(AnnotationError, match="cannot contain a stage"), recording(), whale.stage(), entered:
        pass


def test_recording_after_a_failure_starts_clean() -> None:
    def fail(strategy: Annotation) -> None:
        with recording(), strategy:
            raise ValueError

    with pytest.raises(ValueError):
        fail(whale.split(2))
    assert captured(nn.ReLU(), torch.ones(1)) == [("relu", [])]


def test_a_scope_entered_before_recording_is_not_recorded() -> None:
    with whale.split(2):
        found = captured(nn.ReLU(), torch.ones(1))
    assert found == [("relu", [])]


def test_entering_a_modules_scopes_alone_does_nothing() -> None:
    with enter_module(()):
        pass
