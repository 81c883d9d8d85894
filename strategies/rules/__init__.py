"""Axis rules, by family of operator. Importing this package fills the registry."""

from whale.strategies.rules import (
    index,
    linear_maps,
    loss,
    matmul,
    matrices,
    random,
    recurrent,
    reduce,
    row_wise,
    shape,
    window,
)
from whale.strategies.rules.registry import REGISTRY, LocalShapes, Op, OpAxis, Rule, rule_of

__all__ = ["REGISTRY", "LocalShapes", "Op", "OpAxis", "Rule", "rule_of"]

del index, linear_maps, loss, matmul, matrices, random, recurrent, reduce, row_wise, shape, window
