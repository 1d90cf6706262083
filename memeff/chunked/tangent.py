"""The tangent of attention from its lse, in linear memory, and from it (see tiles.py) the derivatives of every order.

With a dot for tangents, of one tile:
  (1) raw = q k'                          (4) ds = (2) along draw, dterms
  (2) s = finish(raw, terms)              (5) w = p ds;  n_i += w v_j + p dv_j;  r_i += rowsum w
  (3) p = exp(s - lse);  draw = dq k' + q dk'
  at the end: dout = n - r out, dlse = r
The transpose of all that is the backward of xla.py; orders from the second on differentiate it as it stands here.

Where nobody wants them apart, out and its tangent come from one walk, with the running maximum of the forward in the place
of lse: six products a tile instead of seven, and its exponentials once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.autodiff.tile_sum import DimNames, TileLocation, fold, tile_sum
from memeff.chunked import row_sums, schedule
from memeff.chunked.forward import online_softmax_step
from memeff.chunked.tile import Tile, dot, probabilities, weighted_values, zero_nonfinite
from memeff.logits import logits_from_dots, transform_query_key
from memeff.masking import mask_tile, pair_indices
from memeff.problem import Operands, Problem, accumulator_dtype
from memeff.softmax import SEES_NOTHING, Lse, log_sum_exp

# dims of operands, by name; of those that are not told here nothing is cut
OPERAND_DIMS = {
    ".query": "btnh",
    ".key": "bskh",
    ".value": "bskd",
    ".terms.bias": "bnts",
    ".mask": "bnts",
    ".q_lengths": "b",
    ".kv_lengths": "b",
    ".q_offset": "b",
    ".q_segments": "bt",
    ".kv_segments": "bs",
}
WHOLE = "acdefghijlmopqruvwxyz"


def tangent(
    problem: Problem, operands: Operands, out: Array, lse: Lse, along: Operands, narrow: bool = True
) -> tuple[Array, Array]:
    """Tangents of out [B, K, G, T, D] and lse [B, K, G, T] along those of operands, `along` (None: 0). Linear in `along`.

    `narrow`: products of 16-bit operands are of 16 bits; else of float32.
    """
    (B, _, K, G, _), D = operands.query.shape, operands.value.shape[-1]
    how, inputs, arrays = tile_sum_inputs(problem, operands, lse, narrow)
    row = how.known.num_leaves  # the first of lse
    moving, structure, twins = _moving(how, along)
    found = tile_sum(
        TileTangent(**vars(how), moving=structure),
        schedule.tile_grid(problem, operands),
        (*inputs, *(inputs[n] for n in twins)),
        (DimNames("bntd", row, (D,)), DimNames("bnt", row)),
        len(moving),
        *arrays,
        *moving,
    )
    n, r = (x.reshape(B, K, G, *x.shape[2:]) for x in found)
    return (n - r[..., None] * out.astype(r.dtype)).astype(out.dtype), r


def forward_with_tangent(
    problem: Problem, operands: Operands, along: Operands
) -> tuple[tuple[Array, Lse], tuple[Array, Array]]:
    """out [B, K, G, T, D] and lse [B, K, G, T], and the tangents of both along `along` (None: 0), in one walk."""
    how, inputs, arrays = tile_sum_inputs(problem, operands, (), True)
    moving, structure, twins = _moving(how, along)
    tile_along = TileTangent(**vars(how), moving=structure)
    o, l = row_sums.empty_rows(operands)
    start = tuple(lax.collapse(x, 1, 3) for x in (l - jnp.inf, l, o, o, l))
    rows, wide = DimNames("bnt", 0), DimNames("bntd", 0)

    def step(where, old, parts):
        (tile, _), moves = tile_along.tile(where, parts), tile_along.along(where, parts)
        heads = lambda x: x.reshape(*tile.here.query.shape[:4], *x.shape[3:])
        m, l, o, n, r = map(heads, lax.optimization_barrier(old))
        raw, s, ds = tile_along.logits(tile, moves)
        (m, l, o), (_, a, p) = online_softmax_step(problem, tile, raw, s, (m, l, o))
        n_more, r_more = tile_along.weighed(tile, moves, p, ds)
        return (lax.collapse(x, 1, 3) for x in (m, l, o, a[..., None] * n + n_more, a * r + r_more))

    walk = schedule.tile_grid(problem, operands)
    inputs += [inputs[n] for n in twins]
    found = fold(
        step, walk, tuple(inputs), (rows, rows, wide, wide, rows), start, (*arrays, *moving)
    )
    m, l, o, n, r = (x.reshape(*o.shape[:3], *x.shape[2:]) for x in found)
    sees = l != 0
    below = jnp.where(sees, l, 1)
    out, lse = row_sums.normalise(operands, row_sums.RowSums(m, l, l, o), log_sum_exp)
    r = jnp.where(sees, r / below, 0)
    dout = jnp.where(sees[..., None], (n - r[..., None] * o) / below[..., None], 0)
    return (out, lse), (dout.astype(out.dtype), r)


def _moving(how: "TileFunction", along: Operands):
    """What moves: the arrays, their structure, and which of the operands they belong to."""
    moving, structure = jax.tree.flatten(_flat(along))
    at = jax.tree.unflatten(how.known, range(how.known.num_leaves))
    twins = jax.tree.map(
        lambda dx, n: None if dx is None else n, _flat(along), at, is_leaf=_is_none
    )
    return moving, structure, jax.tree.leaves(twins)


def tile_sum_inputs(
    problem: Problem, operands: Operands, lse: tuple[Array | None, ...], narrow: bool
):
    """What functions of tiles are told of them; operands and lse as inputs of a sum: their dims, and the arrays."""
    flat = _flat(operands)
    given = jax.tree_util.tree_leaves_with_path(flat)
    rows = [lax.collapse(x, 1, 3) for x in lse if x is not None]
    letters = [
        OPERAND_DIMS.get(jax.tree_util.keystr(path), WHOLE[: x.ndim]) for path, x in given
    ] + ["bnt"] * len(rows)
    lengths = operands.query.shape[1], operands.key.shape[1]
    how = TileFunction(
        problem, jax.tree.structure(flat), len(rows), (operands.query.shape[2], *lengths), narrow
    )
    return how, [DimNames(x, n) for n, x in enumerate(letters)], [*(x for _, x in given), *rows]


def _flat(operands: Operands) -> Operands:
    """With one dim of query heads, in the order of dims that a tile is cut from."""
    merge = lambda x, dim: None if x is None else lax.collapse(x, dim, dim + 2)
    terms = operands.terms._replace(bias=merge(operands.terms.bias, 1))
    return operands._replace(
        query=merge(operands.query, 2), mask=merge(operands.mask, 1), terms=terms
    )


def _is_none(x) -> bool:
    return x is None


@dataclasses.dataclass(frozen=True)
class TileFunction:
    """What a function of a tile's parts, of operands and of lse, knows of them."""

    problem: Problem
    known: Any  # structure of the operands
    rows: int  # lse in one part, or two; or none, where it is not known yet
    of: tuple[int, int, int]  # K, T, S
    narrow: bool

    def tile(self, where: TileLocation, parts) -> tuple[Tile, Lse]:
        """As xla.py has it, and lse."""
        here = self.operands(self.known, parts[: self.known.num_leaves], where)
        of_rows = [
            x.reshape(here.query.shape[:4]) for x in parts[self.known.num_leaves :][: self.rows]
        ]
        at = pair_indices(
            self.problem, here, here.query[..., 0, 0], where.first, where.rows, where.cols
        )
        keep = mask_tile(self.problem, here, where.rows, where.cols, at) if where.masked else None
        starts = where.first, where.cuts["t"][0], where.cuts["s"][0]
        tile = Tile(here, (), (), (where.rows, where.cols), at, keep, *starts, self.of)
        return tile, Lse(*of_rows, *[None] * (2 - self.rows))

    def operands(self, structure, parts, where: TileLocation) -> Operands:
        """Query B K G t H, key B K c H, value B K c D, mask and bias B|1 K|1 G|1 t|1 c|1; None for what is none."""
        flat: Operands = jax.tree.unflatten(structure, parts)
        b, k = where.cuts["b"][1], where.cuts["k"][1]

        def wide(x):
            return (
                x
                if self.narrow
                else x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
            )

        def heads(x):
            return (
                None
                if x is None
                else x.reshape(x.shape[0], *((k, -1) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])
            )

        def of_keys(x):
            return None if x is None else wide(x).swapaxes(1, 2)

        query = flat.query
        if query is not None:
            query = (
                wide(query)
                .reshape(b, query.shape[1], k, -1, query.shape[-1])
                .transpose(0, 2, 3, 1, 4)
            )
        terms = flat.terms._replace(bias=heads(flat.terms.bias))
        key, value = map(of_keys, flat[1:3])
        return flat._replace(query=query, key=key, value=value, mask=heads(flat.mask), terms=terms)


@dataclasses.dataclass(frozen=True)
class TileTangent(TileFunction):
    """(1) to (5) of a tile; linear in the parts of tangents, the last ones."""

    moving: Any  # structure of tangents

    def __call__(self, where: TileLocation, *parts: Array) -> tuple[Array, Array]:
        tile, lse = self.tile(where, parts)
        along = self.along(where, parts)
        _, s, ds = self.logits(tile, along)
        n, r = self.weighed(tile, along, probabilities(s, lse, tile.keep), ds)
        if where.masked:  # what a row that sees nothing brings along must not meet a 0 of p
            sees = lse.high != SEES_NOTHING
            n, r = jnp.where(sees[..., None], n, 0), jnp.where(sees, r, 0)
        return lax.collapse(n, 1, 3), lax.collapse(r, 1, 3)

    def along(self, where: TileLocation, parts) -> Operands:
        """Tangents of what the tile has of the operands."""
        return self.operands(self.moving, parts[self.known.num_leaves + self.rows :], where)

    def logits(self, tile: Tile, along: Operands) -> tuple[Array, Array, Array]:
        """raw, s and ds of (1) to (4)."""
        here, problem, dtype = tile.here, self.problem, accumulator_dtype(tile.here)
        product = lambda x, y: dot("bkgth,bkch->bkgtc", x, y, problem, dtype)
        or_zeros = lambda x, dx: jnp.zeros_like(x) if dx is None else dx
        q, k, dq, dk = *here[:2], *along[:2]
        dterms = jax.tree.map(or_zeros, here.terms, along.terms)
        if problem.qk_transform is not None:
            rows = lambda q, k, terms: transform_query_key(
                problem, here._replace(query=q, key=k, terms=terms), *tile.at
            )
            moving = jax.tree.map(or_zeros, (q, k), (dq, dk))
            (q, k), (dq, dk) = jax.jvp(rows, (q, k, here.terms), (*moving, dterms))
        q, k = (zero_nonfinite(x, tile.keep is not None) for x in (q, k))
        raw = product(q, k)  # (1)
        sides = [(x, y) for x, y in ((dq, k), (q, dk)) if x is not None and y is not None]
        draw = jnp.zeros_like(raw)
        if sides:  # (3), as one product
            draw = product(*(jnp.concatenate(x, -1) for x in zip(*sides, strict=True)))
        logits = lambda raw, terms: logits_from_dots(problem, raw, terms, tile.keep, tile.places)
        return raw, *jax.jvp(logits, (raw, here.terms), (draw, dterms))  # (2) (4)

    def weighed(self, tile: Tile, along: Operands, p: Array, ds: Array) -> tuple[Array, Array]:
        """What n and r of (5) get."""
        w = p * ds
        n, r = weighted_values(self.problem, tile, w, w.dtype), w.sum(-1)
        if along.value is not None:
            n += weighted_values(
                self.problem, tile._replace(here=tile.here._replace(value=along.value)), p, w.dtype
            )
        return n, r
