"""Hold keys or values in pages, or as 8-bit numbers with scales, of which a tile is read at a time.

A `StoredKeys` stands in `Operands` where an array [B, S, K, H] stands otherwise. The chunked path
reads its shape and cuts tiles from it; nothing of the size of the whole is made.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.device import current_platform
from memeff.sharding import may_be_sharded
from memeff.slicing import slice_letters


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "table"],
    meta_fields=["dtype_name"],
)
@dataclasses.dataclass(frozen=True)
class StoredKeys:
    """Keys or values [B, S, K, H] that are stored in another form.

    Without `table`, `values` is [B, S, K, H] and `scales` [B, K, S]. With it they are in pages,
    [pages, page, K, H] and [pages, K, page], and entry n of row b of `table` [B, S / page] is the
    page of tokens n * page to (n + 1) * page - 1. The scales of a head are neighbours in memory,
    so that a kernel copies those of a tile at once.
    """

    values: Array
    scales: Array | None  # float32; what is read is values * scales
    table: Array | None  # int32, -1 where there is no page
    dtype_name: str  # of what is read

    @property
    def dtype(self) -> Any:
        """Return the dtype of what is read."""
        return jnp.dtype(self.dtype_name)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Return B, S, K and H."""
        first, second, K, H = self.values.shape
        if self.table is None:
            return first, second, K, H
        B, n = self.table.shape
        return B, n * second, K, H

    @property
    def ndim(self) -> int:
        """Return 4."""
        return 4

    def cut(self, cuts: dict[str, tuple[Any, int]]) -> Array:
        """Return the part [b, s, k, H] between `cuts`, {letter: (start, size)}; all H is read.

        A page that the table does not have, or that does not exist, is read as NaN.
        """
        stored = self.values
        if stored.dtype == jnp.float8_e4m3fn and current_platform() == "cpu":
            # XLA reads it in float16. In a loop it would convert all of it before the first step.
            stored, _ = lax.optimization_barrier((stored, [start for start, _ in cuts.values()]))
        # XLA would turn a gather of sharded arrays into all-gathers. On one GPU it is faster than a
        # slice, which XLA copies.
        if self.table is None and may_be_sharded():
            values = slice_letters(stored, "bskh", cuts)
            scales = self.scales
            if scales is not None:
                scales = slice_letters(scales, "bks", cuts).swapaxes(1, 2)
            return self._scaled(values, scales)
        B, S, K, _ = self.shape
        whole = {"b": (0, B), "s": (0, S), "k": (0, K)}
        cuts = whole | {letter: cut for letter, cut in cuts.items() if letter in whole}
        places = self._places(cuts["b"], cuts["s"])
        values = _read(stored, places, cuts["k"], (0, 1, 2))
        scales = self.scales
        if scales is not None:
            scales = _read(scales, places, cuts["k"], (0, 2, 1))
        return self._scaled(values, scales)

    def _scaled(self, values: Array, scales: Array | None) -> Array:
        """Return values [b, s, k, H] times scales [b, s, k] in the dtype of what is read."""
        if scales is not None:
            values = values.astype(scales.dtype) * scales[..., None]
        return values.astype(self.dtype)

    def whole(self) -> Array:
        """Return all of it, [B, S, K, H]."""
        return self.cut({})

    def _places(self, batch: tuple[Any, int], tokens: tuple[Any, int]) -> tuple[Array, Array]:
        """Return where in the first two dims the tokens lie, each [b, s]."""
        first, b = batch
        start, s = tokens
        rows = (jnp.int32(first) + jnp.arange(b, dtype=jnp.int32))[:, None]
        cols = jnp.int32(start) + jnp.arange(s, dtype=jnp.int32)
        if self.table is None:
            return jnp.broadcast_to(rows, (b, s)), jnp.broadcast_to(cols, (b, s))
        return page_places(self.table[rows, cols // self.values.shape[1]], cols, self.values)


def page_places(pages: Array, positions: Array, stored: Array) -> tuple[Array, Array]:
    """Return (page, token in the page) of `positions`, whose pages are `pages`, both [B, n].

    A page of -1 becomes one behind the last, because a negative index would count from the end.
    """
    count, page = stored.shape[:2]
    pages = jnp.where(pages < 0, count, pages)
    return pages, jnp.broadcast_to(positions % page, pages.shape)


def _read(
    x: Array, places: tuple[Array, Array], heads: tuple[Any, int], dims: tuple[int, int, int]
) -> Array:
    """Return x at `places` [b, s] of two of its dims, and at some heads, as [b, s, k, ...].

    `dims` are those of the places and that of the heads. Places outside of x are read as NaN (0
    where x holds integers).
    """
    first, k = heads
    head = jnp.broadcast_to(jnp.int32(first), places[0].shape)
    index = jnp.stack([places[0], places[1], head], axis=-1)
    rest = x.shape[3:]
    sizes = [1, 1, 1, *rest]
    sizes[dims[2]] = k
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(2, 3 + len(rest))),
        collapsed_slice_dims=dims[:2],
        start_index_map=dims,
    )
    fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1 else 0
    return lax.gather(x, index, numbers, sizes, mode="fill", fill_value=fill)
