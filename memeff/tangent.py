"""The tangent of attention from its lse, in linear memory, and from it (see tiles.py) the derivatives of every order.

With a dot for tangents, of one tile:
  (1) raw = q k'                          (4) ds = (2) along draw, dterms
  (2) s = finish(raw, terms)              (5) w = p ds;  n_i += w v_j + p dv_j;  r_i += rowsum w
  (3) p = exp(s - lse);  draw = dq k' + q dk'
  at the end: dout = n - r out, dlse = r
The transpose of all that is the backward of xla.py; orders from the second on differentiate it as it stands here.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff import xla
from memeff.problem import SEES_NOTHING, Lse, Operands, Problem, Terms, finish, places, transformed, visible
from memeff.tiles import Dims, Where, tile_sum

# dims of operands; of those that are not told here nothing is cut
LETTERS = Operands(
    query="btnh",
    key="bskh",
    value="bskd",
    terms=Terms(bias="bnts"),
    mask="bnts",
    q_lengths="b",
    kv_lengths="b",
    q_offset="b",
    q_segments="bt",
    kv_segments="bs",
)  # type: ignore
WHOLE = "acdefghijlmopqruvwxyz"


def tangent(
    problem: Problem, operands: Operands, out: Array, lse: Lse, along: Operands, narrow: bool
) -> tuple[Array, Array]:
    """Tangents of out [B, K, G, T, D] and lse [B, K, G, T] along those of operands, `along` (None: 0). Linear in `along`.

    `narrow`: products of 16-bit operands are of 16 bits; else of float32.
    """
    (B, T, K, G, _), D = operands.query.shape, operands.value.shape[-1]
    every = functools.partial(jax.tree.leaves, is_leaf=lambda x: x is None)
    flat, flat_along = _flat(operands), _flat(along)
    at = lambda x: jax.tree_util.tree_leaves_with_path(x, is_leaf=lambda x: x is None)
    told, tangents = dict(at(LETTERS)), every(flat_along)
    all_of = zip(at(flat), tangents, strict=True)
    given = [(told.get(path) or WHOLE[: x.ndim], x, dx) for (path, x), dx in all_of if x is not None]
    rows = [x.reshape(B, K * G, T) for x in lse if x is not None]
    inputs = [Dims(letters, n) for n, (letters, *_) in enumerate(given)]
    row = len(inputs)
    inputs += [Dims("bnt", row + n) for n in range(len(rows))]
    inputs += [dims for dims, (*_, dx) in zip(inputs, given, strict=False) if dx is not None]
    moving, structure = jax.tree.flatten(flat_along)
    found = tile_sum(
        Along(problem, jax.tree.structure(flat), structure, len(rows), (K, T, operands.key.shape[1]), narrow),
        xla.walk_over(problem, operands),
        tuple(inputs),
        (Dims("bntd", row, (D,)), Dims("bnt", row)),
        len(moving),
        *(x for _, x, _ in given),
        *rows,
        *moving,
    )
    n, r = (x.reshape(B, K, G, *x.shape[2:]) for x in found)
    return (n - r[..., None] * out.astype(r.dtype)).astype(out.dtype), r


def _flat(operands: Operands) -> Operands:
    """With one dim of query heads, in the order of dims that a tile is cut from."""
    merge = lambda x, dim: None if x is None else lax.collapse(x, dim, dim + 2)
    terms = operands.terms._replace(bias=merge(operands.terms.bias, 1))
    return operands._replace(query=merge(operands.query, 2), mask=merge(operands.mask, 1), terms=terms)


@dataclasses.dataclass(frozen=True)
class Along:
    """(1) to (5) of a tile; linear in the parts of tangents, the last ones."""

    problem: Problem
    known: Any  # structure of the operands
    moving: Any  # and of tangents
    rows: int  # lse in one part, or two
    of: tuple[int, int, int]  # K, T, S
    narrow: bool

    def __call__(self, where: Where, *parts: Array) -> tuple[Array, Array]:
        n = self.known.num_leaves
        here = self._tile(jax.tree.unflatten(self.known, parts[:n]), where)
        along = self._tile(jax.tree.unflatten(self.moving, parts[n + self.rows :]), where)
        shape = here.query.shape[:4]
        high, *low = (x.reshape(shape) for x in parts[n : n + self.rows])
        at = places(self.problem, here, here.query[..., 0, 0], where.first, where.rows, where.cols)
        keep = visible(self.problem, here, where.rows, where.cols, at) if where.masked else None
        starts = where.first, where.cuts["t"][0], where.cuts["s"][0]
        tile = xla.Tile(here, (), (), (where.rows, where.cols), at, keep, *starts, self.of)
        dtype, problem = high.dtype, self.problem
        dot = lambda spec, x, y: xla.dot(spec, x, y, problem, dtype)
        or_zeros = lambda x, dx: jnp.zeros_like(x) if dx is None else dx
        moving, dterms = jax.tree.map(or_zeros, (here[:2], here.terms), (along[:2], along.terms))
        rows = lambda q, k, terms: transformed(problem, here._replace(query=q, key=k, terms=terms), where.rows, where.cols)
        q, k, dq, dk = *here[:2], *along[:2]
        if problem.qk_transform is not None:
            (q, k), (dq, dk) = jax.jvp(rows, (*here[:2], here.terms), (*moving, dterms))
        q, k = (xla.finite(x, where.masked) for x in (q, k))
        raw = dot("bkgth,bkch->bkgtc", q, k)  # (1)
        sides = [(x, y) for x, y in ((dq, k), (q, dk)) if x is not None and y is not None]
        draw = jnp.zeros_like(raw)
        if sides:  # (3), as one product
            draw = dot("bkgth,bkch->bkgtc", *(jnp.concatenate(x, -1) for x in zip(*sides, strict=True)))
        logits = lambda raw, terms: finish(problem, raw, terms, keep, at)
        s, ds = jax.jvp(logits, (raw, here.terms), (draw, dterms))  # (2) (4)
        p = jnp.exp(s - high[..., None])
        p = p * jnp.exp(-low[0])[..., None] if low else p
        w = p * ds  # (5)
        r = w.sum(-1)
        parts_of_n = [xla.values(problem, tile, w, dtype)]
        if along.value is not None:
            moved = tile._replace(here=here._replace(value=along.value))
            parts_of_n.append(xla.values(problem, moved, p, dtype))
        n = functools.reduce(jnp.add, parts_of_n)
        if where.masked:  # what a row that sees nothing brings along must not meet a 0 of p
            sees = high != SEES_NOTHING
            n, r = jnp.where(sees[..., None], n, 0), jnp.where(sees, r, 0)
        b, _, _, t = shape
        return n.reshape(b, -1, t, n.shape[-1]), r.reshape(b, -1, t)

    def _tile(self, flat: Operands, where: Where) -> Operands:
        """As xla.py has a tile: query B K G t H, key B K c H, value B K c D, mask and bias B|1 K|1 G|1 t|1 c|1."""
        b, k = where.cuts["b"][1], where.cuts["k"][1]

        def wide(x):
            return x if self.narrow else x.astype(jnp.promote_types(x.dtype, jnp.float32))

        def heads(x):
            return None if x is None else x.reshape(x.shape[0], *((k, -1) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])

        def of_keys(x):
            return None if x is None else wide(x).swapaxes(1, 2)

        query = flat.query
        if query is not None:
            query = wide(query).reshape(b, query.shape[1], k, -1, query.shape[-1]).transpose(0, 2, 3, 1, 4)
        terms = flat.terms._replace(bias=heads(flat.terms.bias))
        return flat._replace(
            query=query, key=of_keys(flat.key), value=of_keys(flat.value), mask=heads(flat.mask), terms=terms
        )
