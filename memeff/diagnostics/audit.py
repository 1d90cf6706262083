"""Check an attention against float64 where it stands: sampled rows and columns, in the time of those alone.

The logits of a sampled row give its lse, out and dq. A sampled column j needs lse and out of all rows, as the call gave
them:
  p_i = exp(s_ij - lse_i)    dv = sum p_i dout_i    dk = sum d_raw_i q_i, d_raw from ds_i = p_i (dout_i v_j - dout_i out_i)
"""

from __future__ import annotations

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
from memeff.call import Call, prepare, run_attention
from memeff.chunked.slicing import TileSize, TileSources, cut_tile
from memeff.chunked.tile import Tile, tile_logits
from memeff.diagnostics.bind import chunked_arguments
from memeff.problem import Operands, Problem, split_axis
from memeff.shape import fold_leads

# The largest relative error that counts as rounding. Plain attention has a third of it or less.
LIMITS = {"float64": 1e-9, "float32": 2e-5, "float16": 5e-3, "bfloat16": 3e-2}
# An error is measured against at least this part of the terms of its sum, because terms that cancel leave their rounding.
PART = 0.25


class Finding(NamedTuple):
    """The largest error of one result on its sampled rows."""

    name: str  # "out", "lse"; "query", "key", "value" for gradients
    error: float
    scale: float  # the largest number of the truth there, or a part of its terms where they cancel
    where: tuple[int, ...]  # batch entry (of all leading dims together), token, head, and entry

    @property
    def relative(self) -> float:
        return self.error / self.scale if self.scale else self.error


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of `memeff.audit`. Its `str` is a table."""

    findings: tuple[Finding, ...]
    samples: int
    dtype: str

    @property
    def limit(self) -> float:
        """The largest relative error that counts as rounding."""
        return LIMITS[self.dtype]

    @property
    def ok(self) -> bool:
        """True if every error is one of rounding."""
        return all(finding.relative <= self.limit for finding in self.findings)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "NOT ok"
        lines = [
            f"{self.samples} rows and columns in float64, {self.dtype}: {verdict}",
            f"{'':10}{'error':>10}{'relative':>10}   where (batch, token, head, entry)",
        ]
        for x in self.findings:
            beyond = "" if x.relative <= self.limit else f"   beyond {self.limit:.0e}"
            lines.append(f"{x.name:10}{x.error:10.2e}{x.relative:10.1e}   {x.where}{beyond}")
        return "\n".join(lines)


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
    **kwargs: Any,
) -> Audit:
    """Check an attention where it stands, in float64: sampled rows of out and dq, sampled columns of dk and dv.

    Run the attention once, forward and gradient, for a random cotangent of out. Then compute the samples again in
    O(samples (T + S)): cheap enough for a training loop now and then, and at a million tokens. Not inside jit.

    Args:
      implementation: a name or None, as in `dot_product_attention`; or a function with the same arguments, for example
        `functools.partial(jax.nn.dot_product_attention, implementation="cudnn")`. A function does not return lse, so
        the chunked path computes it.
      query, key, value, bias, mask: as in `dot_product_attention`.
      samples: the number of rows, and of columns; with grouped heads, of all heads of a group.
      rng: a key of `jax.random` for the samples and the cotangent. Default: `jax.random.key(0)`.
      kwargs: more arguments of `dot_product_attention`, also `backward`, without dropout and sinks.

    Returns: `memeff.Audit`: `ok`, and `findings` (the largest error of each result, and where). Print it for a table.

    Raises: as the call itself does; TypeError inside jit, for dropout, and for sinks.

    Example:
      >>> x = jax.random.normal(jax.random.key(1), (1, 100, 2, 8))
      >>> audit("xla", x, x, x, is_causal=True, samples=8).ok
      True
    """
    # `backward` and `memory_limit` say how to compute, which the truth does not need.
    exact_kwargs = {
        name: x for name, x in kwargs.items() if name not in ("backward", "memory_limit")
    }
    arguments = chunked_arguments("audit", query, key, value, bias, mask, **exact_kwargs)
    call = prepare(arguments, run_attention)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(call.operands))
    if traced or call.problem.dropout is not None:
        raise TypeError("memeff.audit runs outside jit, on arrays, and without dropout. Omit both.")
    run_key, *sample_keys = jax.random.split(jax.random.key(0) if rng is None else rng, 3)
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    ours = functools.partial(dot_product_attention, bias=bias, mask=mask, return_residual=True)
    shape = call.shape
    dout = jax.random.normal(run_key, (*shape.leads, shape.T, shape.N, shape.D), arrays[0].dtype)
    if callable(implementation):
        given = {"bias": bias, "mask": mask}
        given = {name: x for name, x in given.items() if x is not None}
        run = functools.partial(implementation, **given, **kwargs)
        out, gradients = _out_and_gradients(run, dout, arrays, returns_lse=False)
        _, lse = ours(*arrays, implementation="xla", **exact_kwargs)
    else:
        run = functools.partial(ours, implementation=implementation, **kwargs)
        (out, lse), gradients = _out_and_gradients(run, dout, arrays, returns_lse=True)
    return _compare_samples(call, (out, lse, *gradients), dout, sample_keys, samples)


def _out_and_gradients(run, dout: Array, arrays: list[Array], returns_lse: bool):
    """Return what `run` returns for `arrays`, and their gradients for the cotangent `dout` of out."""

    @jax.jit
    def both(dout, *arrays):
        results, pull = jax.vjp(run, *arrays)
        cotangents = (dout, jnp.zeros_like(results[1])) if returns_lse else dout
        return results, pull(jax.tree.map(sharding.shard_like, cotangents, results))

    return both(dout, *arrays)


def _compare_samples(call: Call, results, dout: Array, sample_keys, samples: int) -> Audit:
    """Compare sampled rows and columns of the results with float64; `results`: out, lse, dq, dk, dv in public layout."""
    shape = call.shape
    results, dout = jax.tree.map(lambda x: fold_leads(shape, x), (results, dout))
    operands, results, dout = sharding.on_auto_mesh((call.operands, results, dout))
    with jax.set_mesh(None):  # the caller's mesh is not that of these arrays
        rows = sampled(sample_keys[0], (shape.B, shape.K, shape.T), samples)
        columns = sampled(sample_keys[1], (shape.B, shape.K, shape.S), samples)
        out, lse = results[:2]
        with jax.enable_x64(True):
            true_rows = rows_of(call.problem, operands, dout, rows)
            true_columns = columns_of(call.problem, operands, out, lse, dout, columns)
        dtype = call.operands.query.dtype.name
        return report(results, true_rows, true_columns, rows, columns, shape.G, dtype)


def sampled(key: Array, sizes: tuple[int, ...], samples: int) -> np.ndarray:
    """Return [samples, 3]: batch entry, key head, token."""
    keys = jax.random.split(key, 3)
    columns = [
        np.asarray(jax.random.randint(k, (samples,), 0, n))
        for k, n in zip(keys, sizes, strict=True)
    ]
    return np.stack(columns, 1)


@functools.partial(jax.jit, static_argnums=0)
def rows_of(problem: Problem, operands: Operands, dout: Array, samples: Array):
    """Return lse [n, G], out [n, G, D] and dq [n, G, H] of sampled queries in float64, and the size of dq's terms.

    `dout` is B T N D, `samples` [n, 3] as `sampled` returns them.
    """

    def one_row(sample):
        tile = _cut_sample(problem, operands, sample, (1, operands.key.shape[1]), (), (dout,))
        s, pull = _logits(problem, tile)  # g 1 c
        m = s.max(-1, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0, m)
        l = jnp.exp(s - m).sum(-1, keepdims=True)
        p = jnp.exp(s - m) / jnp.where(l == 0, 1, l)
        v = tile.operands.value[0, 0]
        do = tile.row_vectors[0][0, 0]
        out = p @ v
        dp = do @ v.T
        delta = (do * out).sum(-1, keepdims=True)
        dq = pull(p * (dp - delta))[0]
        dq_size = pull(_size_of_terms(p, do, v, out))[0]
        lse = m + jnp.log(l)
        return lse[:, 0, 0], out[:, 0], dq[0, 0, :, 0], dq_size[0, 0, :, 0]

    return lax.map(one_row, samples)


@functools.partial(jax.jit, static_argnums=0)
def columns_of(
    problem: Problem, operands: Operands, out: Array, lse: Array, dout: Array, samples: Array
):
    """Return dk [n, H] and dv [n, D] of sampled keys in float64, and the size of dk's terms.

    out and dout are B T N D, lse B T N.
    """
    lse = split_axis(lse, 2, operands.shape.K).transpose(0, 2, 3, 1)  # b k g t

    def one_column(sample):
        size = (operands.query.shape[1], 1)
        tile = _cut_sample(problem, operands, sample, size, (lse,), (dout, out))
        s, pull = _logits(problem, tile)  # g t 1
        do, o = (x[0, 0] for x in tile.row_vectors)
        row_lse = tile.row_scalars[0][0, 0, :, :, None]
        p = jnp.where(row_lse == -jnp.inf, 0, jnp.exp(s - row_lse))
        v = tile.operands.value[0, 0]
        dp = do @ v.T
        delta = (do * o).sum(-1, keepdims=True)
        dk = pull(p * (dp - delta))[1]
        dv = (p * do).sum((0, 1))
        dk_size = pull(_size_of_terms(p, do, v, o))[1]
        return dk[0, 0, 0], dv, dk_size[0, 0, 0]

    return lax.map(one_column, samples)


def _size_of_terms(p: Array, do: Array, v: Array, out: Array) -> Array:
    """Return the size of the terms of p (do v' - do out'), because rounding errs by a part of it even where they cancel."""
    return p * jnp.sqrt((do**2) @ (v**2).T + ((do * out) ** 2).sum(-1, keepdims=True))


def _cut_sample(
    problem: Problem, operands: Operands, sample: Array, size: tuple[int, int], rows, like_query
) -> Tile:
    """Cut one row, or one column, of one key head, in float64; what is not finite becomes 0, because nobody may see it."""
    b, k, token = sample
    start = (token, 0) if size[0] == 1 else (0, token)
    lengths = operands.shape.T, operands.shape.S
    sources = TileSources(operands, like_query, rows, lengths)
    tile = cut_tile(problem, sources, TileSize(1, 1, *size), True, (b, k), *start)

    def widen(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def clean(x):
        return jnp.where(jnp.isfinite(x), x, 0)

    tile_operands, rows, wide = jax.tree.map(
        widen, (tile.operands, tile.row_scalars, tile.row_vectors)
    )
    query, key, value = map(clean, tile_operands[:3])
    tile_operands = tile_operands._replace(query=query, key=key, value=value)
    return tile._replace(
        operands=tile_operands, row_scalars=rows, row_vectors=tuple(map(clean, wide))
    )


def _logits(problem: Problem, tile: Tile):
    """Return the logits G t c of the tile's head, and the pullback from their cotangents to its queries and keys."""

    def logits(query, key):
        operands = tile.operands._replace(query=query, key=key)
        _, s, _ = tile_logits(problem, tile._replace(operands=operands))
        return s[0, 0]

    return jax.vjp(logits, *tile.operands[:2])


def report(
    results,
    true_rows,
    true_columns,
    rows: np.ndarray,
    columns: np.ndarray,
    G: int,
    dtype: str,
) -> Audit:
    """Return the findings for `results`: out, lse, dq [B, T, N, ...] and dk, dv [B, S, K, ...]."""
    out, lse, dq, dk, dv = results
    row_places = [(int(b), int(t), int(k * G + g)) for b, k, t in rows for g in range(G)]
    column_places = [(int(b), int(s), int(k)) for b, k, s in columns]
    row_index = tuple(np.asarray(row_places).T)
    column_index = tuple(np.asarray(column_places).T)
    true_lse, true_out, true_dq, dq_size = true_rows
    true_dk, true_dv, dk_size = true_columns

    def of_row(name, x, truth, size=0.0):
        actual = np.asarray(x[row_index]).reshape(len(row_places), -1)
        truth = np.asarray(truth).reshape(len(row_places), -1)
        return _compare(name, actual, truth, row_places, size)

    def of_column(name, x, truth, size=0.0):
        return _compare(name, np.asarray(x[column_index]), np.asarray(truth), column_places, size)

    findings = (
        of_row("lse", lse, true_lse),
        of_row("out", out, true_out),
        of_row("query", dq, true_dq, PART * np.abs(dq_size).max(initial=0)),
        of_column("key", dk, true_dk, PART * np.abs(dk_size).max(initial=0)),
        of_column("value", dv, true_dv),
    )
    return Audit(findings, len(rows), dtype)


def _compare(
    name: str, actual: np.ndarray, truth: np.ndarray, places: list[tuple[int, ...]], least: float
) -> Finding:
    """Return the largest error of `actual` [n, entries], whose rows are at `places`; its scale is at least `least`."""
    actual = actual.astype(np.float64)
    truth = truth.astype(np.float64)
    # The lse of a row that sees no key is -inf in both.
    same = (actual == truth) | (np.isnan(actual) & np.isnan(truth))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(actual - truth))
    error = np.where(np.isnan(error), np.inf, error)
    worst, entry = np.unravel_index(np.argmax(error), error.shape)
    scale = max(np.abs(truth[np.isfinite(truth)]).max(initial=0), least)
    place = (*places[worst], int(entry))
    return Finding(name, float(error[worst, entry]), float(scale), place)
