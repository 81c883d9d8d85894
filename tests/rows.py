"""Pipelines of stages that cut the same rows differently, as data, for tests of programs and of what runs them."""

from __future__ import annotations

from whale.ir.program import Edge, ReduceSpec, StageSpec, Transfer

Shares = dict[int, int]
"""Rows of one micro-batch on each rank of a stage."""


def rows_edge(
    index: int, source: int, target: int, shares: list[list[Shares]], width: int = 4, needs_grad: bool = True
) -> Edge:
    """Join two stages that cut the same rows differently; ``shares[stage][micro_batch]``."""

    def transfers(sources: Shares, targets: Shares) -> tuple[Transfer, ...]:
        result = []
        begin = 0
        for rank, rows in sources.items():
            start = 0
            for other, count in targets.items():
                low, high = max(begin, start), min(begin + rows, start + count)
                if low < high:
                    columns = (0, width)
                    source_box = ((low - begin, high - begin), columns)
                    result.append(Transfer(rank, other, source_box, ((low - start, high - start), columns)))
                start += count
            begin += rows
        return tuple(result)

    pairs = list(zip(shares[source], shares[target], strict=True))
    return Edge(
        index=index,
        value=f"h{source}",
        source_stage=source,
        target_stage=target,
        needs_grad=needs_grad,
        dtype="float64",
        forward=tuple(transfers(a, b) for a, b in pairs),
        backward=tuple(transfers(b, a) if needs_grad else () for a, b in pairs),
        source_shapes=tuple({rank: (rows, width) for rank, rows in a.items()} for a, _ in pairs),
        target_shapes=tuple({rank: (rows, width) for rank, rows in b.items()} for _, b in pairs),
    )


def chain_of(shares: list[list[Shares]]) -> tuple[list[StageSpec], list[Edge], list[ReduceSpec]]:
    stages = [StageSpec(index=i, ranks=tuple(by_micro_batch[0])) for i, by_micro_batch in enumerate(shares)]
    edges = [rows_edge(i, i, i + 1, shares) for i in range(len(shares) - 1)]
    reduces = [ReduceSpec(index=i, ranks=s.ranks, stages=(s.index,)) for i, s in enumerate(reversed(stages))]
    return stages, edges, reduces
