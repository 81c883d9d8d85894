"""Rules of linear algebra on batches of matrices: each matrix is computed by itself."""

from __future__ import annotations

from whale.strategies.rules.registry import Op, OpAxis, Rule, register


@register(
    "aten._linalg_det", "aten._linalg_eigh", "aten._linalg_eigvals", "aten._linalg_slogdet", "aten._linalg_solve_ex",
    "aten._linalg_svd", "aten.cholesky", "aten.cholesky_inverse", "aten.cholesky_solve", "aten.linalg_cholesky_ex",
    "aten.linalg_eig", "aten.linalg_inv_ex", "aten.linalg_lu_factor_ex", "aten.linalg_matrix_exp", "aten.linalg_qr",
    "aten.linalg_solve_triangular",
)  # fmt: skip
def _batched(op: Op) -> Rule | None:
    """The dims before a matrix's are free. Other operands have them too, with a matrix or a vector for each; results
    that the call leaves empty have none."""
    *batch, _, _ = op.shape(0)
    vectors = op.shape(0)[:-1]
    for operand in range(1, len(op.operands)):
        shape = op.shape(operand)
        if list(shape[:-2]) != batch and shape != vectors:
            return None
    results = [index for index, shape in enumerate(op.outputs) if shape != (0,)]
    operands = range(len(op.operands))
    return Rule(
        axes=[
            OpAxis(dict.fromkeys(operands, dim), dict.fromkeys(results, dim))
            for dim, size in enumerate(batch)
            if size > 1
        ]
    )
