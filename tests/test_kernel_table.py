"""The table of docs/kernels.md is what `why_not` says, and names every argument."""

import inspect

from kernel_table import PAGE, page_with, rows, table

import memeff

# They choose how a call runs or what it returns, or name axes of a mesh.
NOT_IN_TABLE = {
    *("query", "key", "value", "implementation", "return_residual", "memory_limit"),
    *("broadcast_dropout", "sequence_axis", "batch_axis", "head_axis", "context_parallel"),
    *("sequence_layout", "score_params", "mask_params", "qk_transform_params"),
    *("deterministic", "dtype", "module"),  # of Flax
}


def test_the_table_is_that_of_why_not():
    """Run python tests/kernel_table.py --write if this fails."""
    assert page_with(table()) == PAGE.read_text()


def test_the_table_has_every_argument():
    titles = " ".join(row.title for row in rows())
    arguments = inspect.signature(memeff.dot_product_attention).parameters
    missing = {name for name in arguments if name not in titles}
    assert missing <= NOT_IN_TABLE
