"""Checks any attention against float64 where it stands: a few rows and columns, in the time of those alone.

Of a sampled row everything is known from its logits: lse, out and dq. Of a sampled column j, with lse and out of all rows as
the call gave them:
  p_i = exp(s_ij - lse_i)    dv = sum p_i dout_i    dk = sum draw_i q_i, draw from ds_i = p_i (dout_i v_j - dout_i out_i)
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff import xla
from memeff.problem import Operands, Problem
from memeff.tile import Tile, logits

# Largest error over largest number, beyond which it is no rounding: plain attention has a third of it or less.
LIMITS = {"float64": 1e-9, "float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
PART = 0.25  # of the terms of a gradient: its sum counts as this at least, for terms that cancel leave their rounding


class Finding(NamedTuple):
    """What one array errs at most, on its sampled rows."""

    name: str  # "out", "lse", "query" and so on for gradients
    error: float  # largest
    scale: float  # largest number of the truth there, or a part of its terms where they cancel
    where: tuple[int, ...]  # of that error: batch entry (of all leading dims together), token, head, and entry

    @property
    def relative(self) -> float:
        return self.error / self.scale if self.scale else self.error


@dataclasses.dataclass(frozen=True)
class Audit:
    """What `memeff.audit` found; its `str` is a table."""

    findings: tuple[Finding, ...]
    samples: int
    dtype: str

    @property
    def limit(self) -> float:
        return LIMITS[self.dtype]

    @property
    def ok(self) -> bool:
        """Is every error one of rounding?"""
        return all(x.relative <= self.limit for x in self.findings)

    def __str__(self) -> str:
        head = f"{self.samples} rows and columns in float64, {self.dtype}: {'ok' if self.ok else 'NOT ok'}"
        lines = [f"{'':10}{'error':>10}{'relative':>10}   where (batch, token, head, entry)"]
        for x in self.findings:
            wrong = "" if x.relative <= self.limit else f"   beyond {self.limit:.0e}"
            lines.append(f"{x.name:10}{x.error:10.2e}{x.relative:10.1e}   {x.where}{wrong}")
        return "\n".join([head, *lines])


def sampled(key: Array, sizes: tuple[int, ...], samples: int) -> np.ndarray:
    """[samples, 3]: batch entry, key head, token."""
    keys = jax.random.split(key, 3)
    return np.stack([np.asarray(jax.random.randint(k, (samples,), 0, n)) for k, n in zip(keys, sizes, strict=True)], 1)


@functools.partial(jax.jit, static_argnums=0)
def rows_of(problem: Problem, operands: Operands, dout: Array, at: Array):
    """lse [n, G], out [n, G, D] and dq [n, G, H] of queries in float64, and what dq would be of `terms` that do not cancel.

    `dout` is B K G T D, `at` as `sampled` gives it.
    """

    def one(at):
        tile = _tile(problem, operands, at, (1, operands.key.shape[1]), (), (dout,))
        s, back = _logits(problem, tile)  # g 1 c
        m = s.max(-1, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0, m)
        l = jnp.exp(s - m).sum(-1, keepdims=True)
        p, v, do = jnp.exp(s - m) / jnp.where(l == 0, 1, l), tile.here.value[0, 0], tile.wide[0][0, 0]
        out = p @ v
        dp, delta = do @ v.T, (do * out).sum(-1, keepdims=True)
        dq = lambda ds: back(ds)[0][0, 0, :, 0]
        return (m + jnp.log(l))[:, 0, 0], out[:, 0], dq(p * (dp - delta)), dq(terms(p, do, v, out))

    return lax.map(one, at)


@functools.partial(jax.jit, static_argnums=0)
def columns_of(problem: Problem, operands: Operands, out: Array, lse: Array, dout: Array, at: Array):
    """dk [n, H] and dv [n, D] of keys in float64, and what dk would be of `terms` that do not cancel.

    out and dout are B K G T D, lse B K G T.
    """

    def one(at):
        tile = _tile(problem, operands, at, (operands.query.shape[1], 1), (lse,), (dout, out))
        s, back = _logits(problem, tile)  # g t 1
        (do, o), lse_ = (x[0, 0] for x in tile.wide), tile.rows[0][0, 0, :, :, None]
        p, v = jnp.where(lse_ == -jnp.inf, 0, jnp.exp(s - lse_)), tile.here.value[0, 0]
        dp, delta = do @ v.T, (do * o).sum(-1, keepdims=True)
        dk = lambda ds: back(ds)[1][0, 0, 0]
        return dk(p * (dp - delta)), (p * do).sum((0, 1)), dk(terms(p, do, v, o))

    return lax.map(one, at)


def terms(p: Array, do: Array, v: Array, out: Array) -> Array:
    """As large as those of p (do v' - do out'): rounding them makes errors that are a part of this, whatever their sum."""
    return p * jnp.sqrt((do**2) @ (v**2).T + ((do * out) ** 2).sum(-1, keepdims=True))


def _tile(problem: Problem, operands: Operands, at: Array, size: tuple[int, int], rows, like_query) -> Tile:
    """One head of keys, a row or a column of it, all finite (what is not, nobody must see) and in float64."""
    problem = dataclasses.replace(problem, chunk_size=size, block=(1, 1))
    lengths, merge = (operands.query.shape[1], operands.key.shape[1]), lambda x, dim: lax.collapse(x, dim, dim + 2)
    flat = merge(operands.query, 2), *(merge(x.transpose(0, 3, 1, 2, 4), 2) for x in like_query)
    mask, bias = (None if x is None else merge(x, 1) for x in (operands.mask, operands.terms.bias))
    operands = operands._replace(mask=mask, terms=operands.terms._replace(bias=bias))
    b, k, token = at
    tile = xla.cut_tile(operands, flat, rows, lengths, problem, True, (b, k), *((token, 0) if size[0] == 1 else (0, token)))
    exact = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    here, rows, wide = jax.tree.map(exact, (tile.here, tile.rows, tile.wide))
    clean = lambda x: jnp.where(jnp.isfinite(x), x, 0)
    query, key, value = map(clean, here[:3])
    return tile._replace(here=here._replace(query=query, key=key, value=value), rows=rows, wide=tuple(map(clean, wide)))


def _logits(problem: Problem, tile: Tile):
    """G t c, and what takes their cotangents to those of the tile's queries and keys."""

    def of(query, key):
        return logits(problem, tile._replace(here=tile.here._replace(query=query, key=key)))[1][0, 0]

    return jax.vjp(of, *tile.here[:2])


def report(found, true_rows, true_columns, rows: np.ndarray, columns: np.ndarray, samples: int, dtype: str) -> Audit:
    """`found`: out, lse, dq [B, T, K, G, ...], dk, dv [B, S, K, ...] as the call gave them."""
    out, lse, dq, dk, dv = found
    G = lse.shape[3]
    of_rows = [(int(b), int(t), int(k * G + g)) for b, k, t in rows for g in range(G)]
    of_columns = [(int(b), int(s), int(k)) for b, k, s in columns]
    at_rows, at_columns = (tuple(jnp.asarray(x)[:, n] for n in (0, 2, 1)) for x in (rows, columns))
    heads = lambda x: np.asarray(x).reshape(len(of_rows), -1)
    (*true_rows, dq_size), (*true_columns, dk_size) = true_rows, true_columns
    least = {name: PART * np.abs(x).max(initial=0) for name, x in (("query", dq_size), ("key", dk_size))}
    findings = [
        _compare(name, heads(x[at_rows]), heads(true), of_rows, least.get(name, 0))
        for name, x, true in zip(("lse", "out", "query"), (lse, out, dq), true_rows, strict=True)
    ]
    findings += [
        _compare(name, np.asarray(x[at_columns]), np.asarray(true), of_columns, least.get(name, 0))
        for name, x, true in zip(("key", "value"), (dk, dv), true_columns, strict=True)
    ]
    return Audit(tuple(findings), samples, dtype)


def _compare(name: str, found: np.ndarray, true: np.ndarray, at: list[tuple[int, ...]], least: float) -> Finding:
    found, true = found.astype(np.float64), true.astype(np.float64)
    same = (found == true) | (np.isnan(found) & np.isnan(true))  # lse of a row that sees no key is -inf
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(found - true))
    error = np.where(np.isnan(error), np.inf, error)
    worst, entry = np.unravel_index(np.argmax(error), error.shape)
    scale = max(np.abs(true[np.isfinite(true)]).max(initial=0), least)
    return Finding(name, float(error[worst, entry]), float(scale), (*at[worst], int(entry)))
