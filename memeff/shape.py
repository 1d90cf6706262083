"""Hold the sizes of one call, and divide a size into parts."""

import math
from typing import Any, NamedTuple

from jax import Array


class CallShape(NamedTuple):
    """The sizes of one call. `leads` are the leading batch dims, B is their product."""

    leads: tuple[int, ...]
    T: Any  # an int, or a symbolic dimension of jax.export
    S: Any
    N: int
    K: int
    H: int
    D: int

    @staticmethod
    def of(query: Array, key: Any, value: Any) -> "CallShape":
        """Return the sizes of a call with these arrays; key and value may be `StoredKeys`."""
        *leads, T, N, H = query.shape
        return CallShape(tuple(leads), T, key.shape[-3], N, key.shape[-2], H, value.shape[-1])

    @property
    def B(self) -> int:
        return math.prod(self.leads)

    @property
    def G(self) -> int:
        return self.N // self.K if self.K else 1

    @property
    def lengths_known(self) -> bool:
        """Return True if jax.export leaves neither T nor S symbolic."""
        return isinstance(self.T, int) and isinstance(self.S, int)

    @property
    def sizes_known(self) -> bool:
        """Return True if jax.export leaves none of B, T and S symbolic."""
        return isinstance(self.B, int) and self.lengths_known


def ceil_div(n: Any, size: Any) -> Any:
    """Return how many parts of `size` hold `n`, whole numbers or arrays of them."""
    return -(-n // size)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return ceil_div(n, multiple) * multiple
