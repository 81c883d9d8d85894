"""Annotations that name nothing, contradict each other, or ask for what the model or the devices do not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.refusals import Launched, compiles, refused
from tests.small_models import Block, Decoder, decoder, tokens
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.errors import AnnotationError, InfeasibleError
from whale.ir.cluster import Cluster

# --- names ------------------------------------------------------------------------------------------------------------


def test_a_key_that_matches_nothing_shows_what_is_there_and_near_misses() -> None:
    with pytest.raises(
        AnnotationError, match=r"'layer\.0' matches no module.*embed, head, layers.*did you mean 'layers\.0'"
    ):
        whale.annotate(decoder(), {"layer.0": whale.split()})


@pytest.mark.parametrize("value", ["split", whale.split, 4, None])
def test_a_value_that_is_no_strategy_names_its_key(value: Any) -> None:
    with pytest.raises(AnnotationError, match=r"the key 'head' has .*no strategy; write whale\.replicate"):
        whale.annotate(decoder(), {"head": value})


def test_a_default_strategy_that_is_a_stage_is_refused() -> None:
    with pytest.raises(AnnotationError, match=r"the default strategy is .*not stage\(\)"):
        whale.set_default_strategy(whale.stage())


# --- degrees, nests and stages ----------------------------------------------------------------------------------------


def test_degrees_that_do_not_fit_the_devices_name_the_nearest_counts(launched: Launched) -> None:
    launched(4)
    model = decoder()
    whale.annotate(model, {"": whale.split(3)})
    refused(InfeasibleError, ["the model with split(3)", "there are 4", "use 3 or 6 devices"], model)
    whale.annotate(model, {"layers.[0-1]": whale.stage(2), "layers.[2-3]": whale.stage(1)})
    parts = ["stage(2) (layers.[0-1]) on 2", "stage(1) (layers.[2-3]) on 1", "there are 4", "use 3 or 6 devices"]
    refused(InfeasibleError, parts, model)


def test_nests_that_contradict_name_both(launched: Launched) -> None:
    launched(4)
    model = decoder()
    whale.annotate(model, {"": [whale.replicate(), whale.split()]})
    refused(AnnotationError, ["replicate() > split()", "neither", "give one of them a number"], model)
    whale.annotate(model, {"layers.0": [whale.stage(2), whale.split(3)], "layers.1": whale.stage(2)})
    refused(AnnotationError, ["split(3) in stage(2) (layers.0)", "3 devices", "the 2 that it has"], model)


def test_a_stage_in_a_stage_is_refused_at_the_line_that_enters_it(launched: Launched) -> None:
    launched(2)
    with pytest.raises(AnnotationError, match=r"the key 'head': stage\(\) lies in stage\(\)"):
        whale.annotate(decoder(), {"head": [whale.stage(), whale.stage()]})

    class Nested(Decoder):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            with whale.stage():
                x = self.embed(tokens)
                with whale.stage():
                    return self.head(x).sum()

    line = Nested.forward.__code__.co_firstlineno + 3
    parts = [f"{__file__}:{line}: stage() lies in stage()", "put one after the other"]
    error = refused(AnnotationError, parts, Nested().double())
    assert error.exit_code == 2


def test_more_stages_than_devices_names_the_stages_and_the_count(launched: Launched) -> None:
    launched(2)
    model = decoder()
    whale.annotate(model, {f"layers.{i}": whale.stage() for i in range(3)})
    error = refused(InfeasibleError, ["stage() (layers.2) on 1", "there are 2", "use 3 devices"], model)
    assert error.exit_code == 4


class WithIdleParts(Decoder):
    """Modules that never run, or that compute nothing from parameters."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.unused = nn.Linear(3, 3)
        self.shift = nn.Identity()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with whale.stage():
            tokens = (tokens + 1) % 32
        with whale.stage():
            return super().forward(self.shift(tokens), labels)


@pytest.mark.parametrize("key", ["unused", "shift"])
def test_a_stage_without_operators_is_named(launched: Launched, key: str) -> None:
    launched(2)
    model = WithIdleParts()
    model.forward = Decoder.forward.__get__(model)  # type: ignore[method-assign]
    whale.annotate(model, {key: whale.stage(), "layers.0": whale.stage()})
    refused(AnnotationError, [f"stage {key!r} is empty", "idle", "with work: 'layers.0'"], model)


class WithNothing(Decoder):
    """A stage that is entered and left at once."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with whale.stage():
            loss = super().forward(tokens, labels)
        with whale.stage():
            pass
        return loss


def test_a_stage_without_operators_in_a_forward_is_named(launched: Launched) -> None:
    launched(2)
    refused(AnnotationError, ["stage 'stage#1' is empty", "computes nothing", "with work: 'stage#0'"], WithNothing())


def test_a_stage_whose_operators_read_no_parameter_is_named_with_the_line(launched: Launched) -> None:
    launched(2)
    line = WithIdleParts.forward.__code__.co_firstlineno + 2
    refused(AnnotationError, ["stage 'stage#0' is empty", f"{__file__}:{line} reads a parameter"], WithIdleParts())


def test_a_module_used_on_both_sides_of_a_stage_is_refused_with_the_line(launched: Launched) -> None:
    launched(2)

    class Loop(Decoder):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](self.embed(tokens)))
            return self.head(self.layers[0](x)).sum()

    model = Loop()
    whale.annotate(model, {"layers.0": whale.stage(), "layers.1": whale.stage()})
    parts = ["stage 'layers.0' comes before stage 'layers.1'", "small_models.py:", "in the order of the data's flow"]
    refused(AnnotationError, parts, model)


def test_interleaved_stages_that_cannot_be_dealt_name_counts_that_can(launched: Launched) -> None:
    launched(3)
    model = decoder()
    whale.annotate(model, {f"layers.{i}": whale.stage() for i in range(4)})
    parts = ["schedule='interleaved' deals 4 stages", "the 3 devices", "multiple of 2"]
    refused(InfeasibleError, parts, model, schedule="interleaved")
    launched(3)
    degrees = [1, 2, 2, 1]
    whale.annotate(model, {f"layers.{i}": whale.stage(n) for i, n in enumerate(degrees)})
    parts = ["puts stage(2) (layers.2) on the 1 devices of stage(1) (layers.0)", "every second stage"]
    refused(InfeasibleError, parts, model, schedule="interleaved")


# --- heads and units --------------------------------------------------------------------------------------------------


def test_an_attention_with_fewer_heads_than_ranks_names_module_heads_and_legal_degrees(launched: Launched) -> None:
    launched(4)
    model = decoder(heads=2, layers=1)
    whale.annotate(model, {"": whale.split()})
    parts = ["split over 4 devices", "the attention in layers.0", "small_models.py:", "has 2 heads", "over 1 or 2"]
    error = refused(InfeasibleError, parts, model)
    assert error.exit_code == 4
    model = decoder(heads=3, width=12, layers=1)
    whale.annotate(model, {"": [whale.replicate(2), whale.split(2)]})
    compiles(model)  # two heads on one rank and one on the other


@pytest.mark.parametrize("heads", [(1, 4), (1, 1)], ids=str)
def test_an_attention_with_fewer_heads_than_others_is_computed_whole(heads: tuple[int, int]) -> None:
    model = decoder(layers=0)
    model.layers.extend(Block(16, number).double() for number in heads)
    whale.annotate(model, {"": whale.split()})
    compilation = compile_model(model, tokens(), Cluster.homogeneous(2), Options(), device="cpu", training=True)
    (text,) = (text for text in compilation.warnings if "fewer heads" in text)
    assert ["layers.0" in text, "layers.1" in text] == [True, heads[1] == 1] and "computed whole" in text


def llama(*, heads: int, attention: str = "sdpa") -> Any:
    """A library's model with heads of 8 numbers and two key-value heads."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=8 * heads,
        intermediate_size=32,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=32,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_the_heads_of_a_library_s_attention_are_counted_too(launched: Launched, kind: str) -> None:
    launched(4)
    model = llama(heads=2, attention=kind)
    whale.annotate(model, {"": whale.split()})
    ids = torch.zeros(2, 4, dtype=torch.long)
    parts = ["model.layers.0.self_attn", "modeling_llama.py:", "has 2 heads"]
    refused(InfeasibleError, parts, model, {"input_ids": ids, "labels": ids})


class Steps(nn.Module):
    """A recurrent cell that is called for each position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 6)
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return state.square().mean()


def test_a_matrix_that_stays_whole_is_named_once(launched: Launched) -> None:
    launched(2)
    model = Steps()
    whale.annotate(model, {"": whale.split()})
    compilation = compile_model(
        model, (torch.zeros(4, 3, 4),), Cluster.homogeneous(2), Options(), device="cpu", training=True
    )
    (text,) = (text for text in compilation.warnings if "stays whole" in text)
    assert text.count("cell.weight_hh") == 1


def test_fewer_key_value_heads_than_ranks_are_legal_with_at_most_one_warning(launched: Launched) -> None:
    launched(4)
    model = llama(heads=8)
    whale.annotate(model, {"": whale.split()})
    ids = torch.zeros(2, 4, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    compilation = compile_model(model, batch, Cluster.homogeneous(4), Options(), device="cpu", training=True)
    assert len([text for text in compilation.warnings if "split" in text]) <= 1


@pytest.mark.parametrize("experts", [1, 2])
def test_fewer_experts_than_ranks_are_counted(launched: Launched, experts: int) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    launched(3)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 1}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=experts))
    whale.annotate(model, {"model.layers.*.mlp.experts": whale.split(experts="whole")})
    ids = torch.zeros(3, 4, dtype=torch.long)
    counted = f"has {experts} expert{'s' if experts > 1 else ''}, and each of them needs one"
    refused(
        InfeasibleError,
        ["split(experts='whole') over 3 devices", "model.layers.0.mlp.experts", counted, "experts='cut'"],
        model,
        {"input_ids": ids, "labels": ids},
    )


def test_a_matrix_with_fewer_units_than_ranks_is_named_with_its_shape(launched: Launched) -> None:
    launched(4)

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x).pow(2).mean()

    model = Tiny()
    whale.annotate(model, {"": whale.split()})
    refused(
        InfeasibleError,
        ["score.weight of shape (2, 3)", "at most 3 parts", "over 3 or fewer"],
        model,
        torch.randn(4, 3),
    )
