"""Say why the kernels of any family cannot run a call, or are slower than the chunked path.

Each reason is a clause that stands behind "because": no capital letter, no period.
"""

from memeff.problem import Operands

# Kernels were measured to be faster from 64 queries on. With fewer, most of a tile is empty, except
# in the decode kernel.
FEWEST_QUERIES = 64


def unsupported_sizes(operands: Operands, family: str, largest_head: int) -> str | None:
    """Return a reason if the kernels of `family` do not support the lengths or the head dims."""
    query, key, value = operands[:3]
    sizes = (*query.shape, *key.shape, *value.shape)
    H, D = query.shape[-1], value.shape[-1]
    if not all(isinstance(size, int) for size in sizes):
        return f"the {family} kernels do not support symbolic sizes"
    if 0 in sizes:
        return f"the {family} kernels do not support sizes of 0"
    if max(H, D) > largest_head:
        return (
            f"the {family} kernels support heads of up to {largest_head}, and this call has H={H}, "
            f"D={D}"
        )
    return None


def too_few_queries(operands: Operands, family: str) -> str | None:
    """Return a reason if there are too few queries to fill a tile of the kernels of `family`."""
    T = operands.query.shape[1]
    if T >= FEWEST_QUERIES:
        return None
    return f"a tile of the {family} kernels would be mostly empty with {T} queries"
