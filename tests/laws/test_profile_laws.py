"""The profile of a GPT of any size equals a count by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from whale.cli.model_loader import load_model
from whale.strategies.profile import profile_model


@settings(max_examples=4, deadline=None, derandomize=True)
@given(heads=st.sampled_from([2, 4]), size=st.integers(2, 5), seq=st.integers(2, 9), ffn=st.integers(4, 40))
def test_costs_of_a_block_follow_its_sizes(heads: int, size: int, seq: int, ffn: int) -> None:
    hidden = heads * size
    sizes = {"layers": 2, "hidden": hidden, "heads": heads, "seq": seq, "ffn": ffn, "vocab": 32, "dropout": 0.0}
    loaded = load_model("examples/models/gpt.py:gpt", sizes, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1,))
    assert profile.layers == (0, 1, 1, 2)
    (block,) = profile.kinds[1].variants
    for rows in (1, 6):
        products = 2 * rows * seq * (4 * hidden**2 + 2 * hidden * ffn)
        scores = 4 * rows * seq**2 * hidden
        assert sum(kernel.flops(rows) for kernel in block.forward) == products + scores
        assert sum(kernel.flops(rows) for kernel in block.backward) == 2 * products + 2.5 * scores
        # inputs of both norms and of both halves, queries, keys, values, context; before and after GELU
        assert sum(s.size.elements(rows) for s in block.saved) == rows * seq * (8 * hidden + 2 * ffn)
    assert block.parameters == 4 * hidden**2 + 2 * hidden * ffn + 9 * hidden + ffn
