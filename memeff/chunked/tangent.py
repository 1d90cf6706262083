"""Compute the tangent of attention from its lse, in linear memory.

`TileSum` makes the derivatives of every order from it. With a dot for tangents, of one tile:
  (1) raw = q k'                            (4) ds = (2) along d_raw, dparams
  (2) s = logits_from_dots(raw, params)     (5) w = p ds;  n_i += w v_j + p dv_j;  r_i += rowsum w
  (3) p = exp(s - lse);  d_raw = dq k' + q dk'
  at the end: dout = n - r out, dlse = r
The transpose of all that is the gradient of backward.py; orders from the second on differentiate
these steps as they stand.

`forward_with_tangent` computes out and its tangent in one pass, with the running maximum of the
forward in the place of lse: six products a tile instead of seven, and its exponentials once. Two
passes take 1.1 to 1.35 times as long (CPU, 2k and 4k tokens, heads of 64 and 128, float32 and
bfloat16).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.autodiff.primitives import or_zeros
from memeff.autodiff.tile_sum import DimNames, TileLocation, TileSum, fold
from memeff.chunked import row_sums
from memeff.chunked.forward import online_softmax_step
from memeff.chunked.schedule import tile_grid
from memeff.chunked.slicing import make_tile
from memeff.chunked.tile import (
    Tile,
    probabilities,
    raw_product,
    raw_tangent,
    transform_vectors,
    weighted_values,
)
from memeff.logits import logits_from_dots
from memeff.problem import (
    OPERAND_DIMS,
    LogitParams,
    Operands,
    Problem,
    Schedule,
    accumulator_dtype,
    map_operands,
    split_axis,
    split_heads,
    sum_dtype,
)
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, log_sum_exp

WHOLE = "acdefghijlmopqruvwxyz"  # names of dims that are not cut


def tangent(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    tangents: Operands,
    narrow: bool = True,
) -> tuple[Array, Array]:
    """Return the tangents of out [B, K, G, T, D] and lse [B, K, G, T], linear in `tangents`.

    A tangent that is None is 0. `narrow`: multiply 16-bit operands as they are; otherwise multiply
    in float32.
    """
    D = operands.value.shape[-1]
    function, inputs, arrays = _tangent_inputs(problem, operands, lse, tangents, narrow)
    first_lse = function.structure.num_leaves  # index of an input
    sums = TileSum(
        function,
        tile_grid(problem, schedule, operands),
        inputs,
        totals=(DimNames("bntd", first_lse, (D,)), DimNames("bnt", first_lse)),
        linear=function.tangent_structure.num_leaves,
    )
    n, r = (split_axis(x, 1, operands.shape.K) for x in sums(*arrays))
    return (n - r[..., None] * out.astype(r.dtype)).astype(out.dtype), r


def forward_with_tangent(
    problem: Problem, schedule: Schedule, operands: Operands, tangents: Operands
) -> tuple[tuple[Array, Lse], tuple[Array, Array]]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T], and the tangents of both, from one pass."""
    tile_tangent, inputs, arrays = _tangent_inputs(problem, operands, (), tangents, True)
    o, l = row_sums.empty_rows(operands)
    start = tuple(lax.collapse(x, 1, 3) for x in (l - jnp.inf, l, o, o, l))  # b n t, b n t d
    scalars = DimNames("bnt", 0)
    vectors = DimNames("bntd", 0)

    def step(location: TileLocation, old, parts):
        tile, _ = tile_tangent.tile(location, parts)
        tile_tangents = tile_tangent.tangents(location, parts)
        old = lax.optimization_barrier(old)
        m, l, o, n, r = (x.reshape(*tile.operands.query.shape[:4], *x.shape[3:]) for x in old)
        raw, s, ds = tile_tangent.logits(tile, tile_tangents)
        (m, l, o), (_, a, p) = online_softmax_step(problem, tile, raw, s, (m, l, o))
        n_part, r_part = tile_tangent.sums(tile, tile_tangents, p, ds)
        n = a[..., None] * n + n_part
        r = a * r + r_part
        return (lax.collapse(x, 1, 3) for x in (m, l, o, n, r))

    m, l, o, n, r = fold(
        step,
        tile_grid(problem, schedule, operands),
        inputs,
        (scalars, scalars, vectors, vectors, scalars),
        start,
        arrays,
    )
    m, l, o, n, r = (split_axis(x, 1, operands.shape.K) for x in (m, l, o, n, r))
    visible = l != 0
    divisor = jnp.where(visible, l, 1)
    out, lse = row_sums.divide_sums(schedule, operands, row_sums.RowSums(m, l, l, o), log_sum_exp)
    r = jnp.where(visible, r / divisor, 0)
    dout = jnp.where(visible[..., None], (n - r[..., None] * o) / divisor[..., None], 0)
    return (out, lse), (dout.astype(out.dtype), r)


def _tangent_inputs(
    problem: Problem,
    operands: Operands,
    lse: tuple[Array | None, ...],
    tangents: Operands,
    narrow: bool,
) -> tuple["TileTangent", tuple[DimNames, ...], tuple[Array, ...]]:
    """Return operands, lse and tangents as inputs of a `TileTangent`: this, dims, and arrays."""
    function, inputs, arrays = tile_sum_inputs(problem, operands, lse, narrow)
    active, structure = jax.tree.flatten(tangents)
    all_tangents = function.structure.flatten_up_to(tangents)
    pairs = zip(inputs, all_tangents, strict=False)  # lse has no tangent
    inputs += [dims for dims, dx in pairs if dx is not None]
    tile_tangent = TileTangent(**vars(function), tangent_structure=structure)
    return tile_tangent, tuple(inputs), (*arrays, *active)


def tile_sum_inputs(
    problem: Problem, operands: Operands, lse: tuple[Array | None, ...], narrow: bool
) -> tuple["TileFunction", list[DimNames], list[Array]]:
    """Return operands and lse as inputs of a `TileSum`: a `TileFunction`, dims, and arrays."""
    inputs = []
    arrays = []
    for path, x in jax.tree_util.tree_leaves_with_path(operands):
        dims = OPERAND_DIMS.get(getattr(path[-1], "name", ""), WHOLE[: x.ndim])
        inputs.append(DimNames(dims, len(inputs)))
        arrays.append(x)
    lse_arrays = [lax.collapse(x, 1, 3) for x in lse if x is not None]  # b n t
    for x in lse_arrays:
        inputs.append(DimNames("bnt", len(inputs)))
        arrays.append(x)
    shape = operands.shape
    sizes = shape.K, shape.T, shape.S
    structure = jax.tree.structure(operands)
    return TileFunction(problem, structure, len(lse_arrays), sizes, narrow), inputs, arrays


@dataclasses.dataclass(frozen=True)
class TileFunction:
    """A function of the parts of operands and lse that a `TileSum` cuts for a tile."""

    problem: Problem
    structure: Any  # of the operands, as a pytree
    lse_count: int  # arrays of lse: one or two, or none where it is not known yet
    sizes: tuple[int, int, int]  # K, T, S
    narrow: bool  # multiply 16-bit operands as they are

    def tile(self, location: TileLocation, parts) -> tuple[Tile, Lse]:
        """Return the tile and its lse, B K G t."""
        count = self.structure.num_leaves
        operands = self.tile_operands(self.structure, parts[:count], location)
        rows = operands.query.shape[:4]
        lse = [x.reshape(rows) for x in parts[count : count + self.lse_count]]
        tile = make_tile(self.problem, location, operands, self.sizes)
        return tile, Lse(*lse, *[None] * (2 - self.lse_count))

    def tile_operands(self, structure, parts, location: TileLocation) -> Operands:
        """Return the parts in the layout of a tile; operands that `structure` lacks are None."""
        operands: Operands = jax.tree.unflatten(structure, parts)

        def widen(x: Array, dims: str) -> Array:
            wide = not self.narrow and dims in ("btnh", "bskh", "bskd")
            return x.astype(sum_dtype(x.dtype)) if wide else x

        _, k = location.cuts["k"]
        return split_heads(map_operands(widen, operands), k)


@dataclasses.dataclass(frozen=True)
class TileTangent(TileFunction):
    """Steps (1) to (5) of a tile, linear in the parts of tangents, which are the last ones."""

    tangent_structure: Any

    def __call__(self, location: TileLocation, *parts: Array) -> tuple[Array, Array]:
        """Return the tile's part of n [b, n, t, d] and r [b, n, t]."""
        tile, lse = self.tile(location, parts)
        tangents = self.tangents(location, parts)
        _, s, ds = self.logits(tile, tangents)
        p = probabilities(s, lse, tile.keep)  # (3)
        n, r = self.sums(tile, tangents, p, ds)
        if location.masked:  # tangents of a row that sees nothing must not meet a 0 of p
            visible = lse.high != LSE_OF_EMPTY_ROW
            n = jnp.where(visible[..., None], n, 0)
            r = jnp.where(visible, r, 0)
        return lax.collapse(n, 1, 3), lax.collapse(r, 1, 3)

    def tangents(self, location: TileLocation, parts) -> Operands:
        """Return the tangents of the tile's operands; None where they are 0."""
        first = self.structure.num_leaves + self.lse_count
        return self.tile_operands(self.tangent_structure, parts[first:], location)

    def logits(self, tile: Tile, tangents: Operands) -> tuple[Array, Array, Array]:
        """Return raw, s and ds of (1) to (4), B K G t c."""
        problem = self.problem
        here = tile.operands

        def logits(raw: Array, terms: LogitParams) -> Array:
            return logits_from_dots(problem, raw, terms, tile.keep, tile.indices)

        q, k, dq, dk = here.query, here.key, tangents.query, tangents.key
        dterms = jax.tree.map(or_zeros, here.logit_params, tangents.logit_params)
        if problem.qk_transform is not None:
            transform = functools.partial(transform_vectors, problem, tile)
            dq = or_zeros(q, dq)
            dk = or_zeros(k, dk)
            (q, k), (dq, dk) = jax.jvp(transform, (q, k, here.logit_params), (dq, dk, dterms))
        raw = raw_product(problem, tile, q, k)  # (1)
        masked = tile.keep is not None
        dtype = accumulator_dtype(tile.operands)
        d_raw = raw_tangent(problem, masked, dtype, raw, q, k, dq, dk)  # (3)
        s, ds = jax.jvp(logits, (raw, here.logit_params), (d_raw, dterms))  # (2) (4)
        return raw, s, ds

    def sums(self, tile: Tile, tangents: Operands, p: Array, ds: Array) -> tuple[Array, Array]:
        """Return the tile's part of n [B, K, G, t, D] and r [B, K, G, t] of (5)."""
        w = p * ds
        n = weighted_values(self.problem, tile, w, w.dtype)
        r = w.sum(-1)
        if tangents.value is not None:
            with_dv = tile._replace(operands=tile.operands._replace(value=tangents.value))
            n += weighted_values(self.problem, with_dv, p, w.dtype)
        return n, r
