"""Checks any attention against float64 where it stands: a few rows and columns, in the time of those alone.

Of a sampled row everything is known from its logits: lse, out and dq. Of a sampled column j, with lse and out of all rows as
the call gave them:
  p_i = exp(s_ij - lse_i)    dv = sum p_i dout_i    dk = sum draw_i q_i, draw from ds_i = p_i (dout_i v_j - dout_i out_i)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from memeff import sharding
from memeff.attention import dot_product_attention
from memeff.call import prepare, run_attention
from memeff.chunked import slicing
from memeff.chunked.tile import Tile, tile_logits
from memeff.diagnostics.arguments import bind_chunked_arguments
from memeff.problem import Operands, Problem

# Largest error over largest number, beyond which it is no rounding: plain attention has a third of
# it or less.
LIMITS = {"float64": 1e-9, "float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
# of the terms of a gradient: its sum counts as this at least, for terms that cancel leave their
# rounding
PART = 0.25


class Finding(NamedTuple):
    """What one array errs at most, on its sampled rows."""

    name: str  # "out", "lse", "query" and so on for gradients
    error: float  # largest
    scale: float  # largest number of the truth there, or a part of its terms where they cancel
    # of that error: batch entry (of all leading dims together), token, head, and entry
    where: tuple[int, ...]

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
    return np.stack(
        [
            np.asarray(jax.random.randint(k, (samples,), 0, n))
            for k, n in zip(keys, sizes, strict=True)
        ],
        1,
    )


@functools.partial(jax.jit, static_argnums=0)
def rows_of(problem: Problem, operands: Operands, dout: Array, at: Array):
    """lse [n, G], out [n, G, D] and dq [n, G, H] of queries in float64, and what dq would be of `terms` that do not cancel.

    `dout` is B K G T D, `at` as `sampled` gives it.
    """

    def one(at):
        tile = _query_tile(problem, operands, at, (1, operands.key.shape[1]), (), (dout,))
        s, back = _logits(problem, tile)  # g 1 c
        m = s.max(-1, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0, m)
        l = jnp.exp(s - m).sum(-1, keepdims=True)
        p, v, do = (
            jnp.exp(s - m) / jnp.where(l == 0, 1, l),
            tile.here.value[0, 0],
            tile.wide[0][0, 0],
        )
        out = p @ v
        dp, delta = do @ v.T, (do * out).sum(-1, keepdims=True)
        dq = lambda ds: back(ds)[0][0, 0, :, 0]
        return (
            (m + jnp.log(l))[:, 0, 0],
            out[:, 0],
            dq(p * (dp - delta)),
            dq(_wide_logit_params(p, do, v, out)),
        )

    return lax.map(one, at)


@functools.partial(jax.jit, static_argnums=0)
def columns_of(
    problem: Problem, operands: Operands, out: Array, lse: Array, dout: Array, at: Array
):
    """dk [n, H] and dv [n, D] of keys in float64, and what dk would be of `terms` that do not cancel.

    out and dout are B K G T D, lse B K G T.
    """

    def one(at):
        tile = _query_tile(problem, operands, at, (operands.query.shape[1], 1), (lse,), (dout, out))
        s, back = _logits(problem, tile)  # g t 1
        (do, o), lse_ = (x[0, 0] for x in tile.wide), tile.rows[0][0, 0, :, :, None]
        p, v = jnp.where(lse_ == -jnp.inf, 0, jnp.exp(s - lse_)), tile.here.value[0, 0]
        dp, delta = do @ v.T, (do * o).sum(-1, keepdims=True)
        dk = lambda ds: back(ds)[1][0, 0, 0]
        return dk(p * (dp - delta)), (p * do).sum((0, 1)), dk(_wide_logit_params(p, do, v, o))

    return lax.map(one, at)


def _wide_logit_params(p: Array, do: Array, v: Array, out: Array) -> Array:
    """As large as those of p (do v' - do out'): rounding them makes errors that are a part of this, whatever their sum."""
    return p * jnp.sqrt((do**2) @ (v**2).T + ((do * out) ** 2).sum(-1, keepdims=True))


def _query_tile(
    problem: Problem, operands: Operands, at: Array, size: tuple[int, int], rows, like_query
) -> Tile:
    """One head of keys, a row or a column of it, all finite (what is not, nobody must see) and in float64."""
    problem = dataclasses.replace(problem, chunk_size=size, block=(1, 1))
    lengths, merge = (
        (operands.query.shape[1], operands.key.shape[1]),
        lambda x, dim: lax.collapse(x, dim, dim + 2),
    )
    flat = merge(operands.query, 2), *(merge(x.transpose(0, 3, 1, 2, 4), 2) for x in like_query)
    mask, bias = (None if x is None else merge(x, 1) for x in (operands.mask, operands.terms.bias))
    operands = operands._replace(mask=mask, terms=operands.terms._replace(bias=bias))
    b, k, token = at
    tile = slicing.cut_tile(
        operands,
        flat,
        rows,
        lengths,
        problem,
        True,
        (b, k),
        *((token, 0) if size[0] == 1 else (0, token)),
    )
    exact = lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    here, rows, wide = jax.tree.map(exact, (tile.here, tile.rows, tile.wide))
    clean = lambda x: jnp.where(jnp.isfinite(x), x, 0)
    query, key, value = map(clean, here[:3])
    return tile._replace(
        here=here._replace(query=query, key=key, value=value),
        rows=rows,
        wide=tuple(map(clean, wide)),
    )


def _logits(problem: Problem, tile: Tile):
    """G t c, and what takes their cotangents to those of the tile's queries and keys."""

    def of(query, key):
        return tile_logits(problem, tile._replace(here=tile.here._replace(query=query, key=key)))[
            1
        ][0, 0]

    return jax.vjp(of, *tile.here[:2])


def report(
    found, true_rows, true_columns, rows: np.ndarray, columns: np.ndarray, samples: int, dtype: str
) -> Audit:
    """`found`: out, lse, dq [B, T, K, G, ...], dk, dv [B, S, K, ...] as the call gave them."""
    out, lse, dq, dk, dv = found
    G = lse.shape[3]
    of_rows = [(int(b), int(t), int(k * G + g)) for b, k, t in rows for g in range(G)]
    of_columns = [(int(b), int(s), int(k)) for b, k, s in columns]
    at_rows, at_columns = (tuple(jnp.asarray(x)[:, n] for n in (0, 2, 1)) for x in (rows, columns))
    heads = lambda x: np.asarray(x).reshape(len(of_rows), -1)
    (*true_rows, dq_size), (*true_columns, dk_size) = true_rows, true_columns
    least = {
        name: PART * np.abs(x).max(initial=0) for name, x in (("query", dq_size), ("key", dk_size))
    }
    findings = [
        _compare(name, heads(x[at_rows]), heads(true), of_rows, least.get(name, 0))
        for name, x, true in zip(("lse", "out", "query"), (lse, out, dq), true_rows, strict=True)
    ]
    findings += [
        _compare(name, np.asarray(x[at_columns]), np.asarray(true), of_columns, least.get(name, 0))
        for name, x, true in zip(("key", "value"), (dk, dv), true_columns, strict=True)
    ]
    return Audit(tuple(findings), samples, dtype)


def _compare(
    name: str, found: np.ndarray, true: np.ndarray, at: list[tuple[int, ...]], least: float
) -> Finding:
    found, true = found.astype(np.float64), true.astype(np.float64)
    # lse of a row that sees no key is -inf
    same = (found == true) | (np.isnan(found) & np.isnan(true))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(found - true))
    error = np.where(np.isnan(error), np.inf, error)
    worst, entry = np.unravel_index(np.argmax(error), error.shape)
    scale = max(np.abs(true[np.isfinite(true)]).max(initial=0), least)
    return Finding(name, float(error[worst, entry]), float(scale), (*at[worst], int(entry)))


def audit(
    implementation: Callable[..., Any] | str | None,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    samples: int = 64,
    rng: ArrayLike | None = None,
    **how: Any,
) -> Audit:
    """Checks an attention where it stands: sampled rows of out and dq and columns of dk and dv, in float64.

    It is run once, forward and gradient (for a random cotangent of out), and then what is sampled is made again, in
    O(samples (T + S)): cheap enough for a training loop now and then, and at a million tokens. Not inside jit.

    Args:
      implementation: of `dot_product_attention`, a name or None; or a function that takes what it takes (`how` as well), for
        example `functools.partial(jax.nn.dot_product_attention, implementation="cudnn")`. Of a function lse is not known:
        it is made by the chunked path.
      query, key, value, bias, mask: as in `dot_product_attention`.
      samples: rows, and columns; of grouped heads all of the group.
      rng: a key of `jax.random` that says which, and gives the cotangent. Default: `jax.random.key(0)`.
      how: more arguments of `dot_product_attention`, `backward` too; without dropout and sinks.

    Returns: `memeff.Audit`: `ok`, `findings` (largest error of each, and where); print it for a table.

    Raises: as the call itself does; TypeError inside jit, for dropout, and for sinks.

    Example:
      >>> x = jax.random.normal(jax.random.key(1), (1, 100, 2, 8))
      >>> audit("xla", x, x, x, is_causal=True, samples=8).ok
      True
    """
    # how, not what
    of_truth = {name: x for name, x in how.items() if name not in ("backward", "memory_limit")}
    call = prepare(
        bind_chunked_arguments("audit", query, key, value, bias, mask, of_truth), run_attention
    )
    if (
        any(isinstance(x, Tracer) for x in jax.tree.leaves(call.operands))
        or call.problem.dropout is not None
    ):
        raise TypeError(
            "memeff.audit runs outside jit, on arrays, and without dropout: leave both away."
        )
    shape, keys = call.shape, jax.random.split(jax.random.key(0) if rng is None else rng, 3)
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    ours = functools.partial(dot_product_attention, bias=bias, mask=mask, return_residual=True)
    known = not callable(implementation)
    if known:
        run = functools.partial(ours, implementation=implementation, **how)
    else:
        extra = {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
        run = functools.partial(implementation, **extra, **how)
    dout = jax.random.normal(keys[0], (*shape.leads, shape.T, shape.N, shape.D), arrays[0].dtype)

    @jax.jit
    def both(dout, *arrays):
        out, pull = jax.vjp(run, *arrays)
        cotangents = (dout, jnp.zeros_like(out[1])) if known else dout
        return out, pull(jax.tree.map(sharding.shard_like, cotangents, out))

    out, gradients = both(dout, *arrays)
    out, lse = out if known else (out, ours(*arrays, implementation="xla", **of_truth)[1])
    apart = lambda x, length, *heads: x.reshape(
        shape.B, length, *heads, *x.shape[len(shape.leads) + 2 :]
    )
    of_query, of_key = (shape.T, shape.K, shape.G), (shape.S, shape.K)
    sizes = zip((*[of_query] * 3, *[of_key] * 2), (out, lse, *gradients), strict=True)
    found = [apart(x, *size) for size, x in sizes]
    operands, found, dout = sharding.on_auto_mesh((call.operands, found, apart(dout, *of_query)))
    rows, columns = (
        sampled(k, (shape.B, shape.K, n), samples)
        for k, n in zip(keys[1:], of_query[:1] + of_key[:1], strict=True)
    )
    inner = lambda x: jnp.moveaxis(x, 1, 3)
    with jax.set_mesh(None):
        with jax.enable_x64(True):
            true_rows = rows_of(call.problem, operands, inner(dout), rows)
            of_rows = (inner(x) for x in found[:2])
            true_columns = columns_of(call.problem, operands, *of_rows, inner(dout), columns)
        return report(found, true_rows, true_columns, rows, columns, samples, arrays[0].dtype.name)
