"""Check an attention against float64 where it stands, in the time of sampled rows and columns.

The logits of a sampled row give its lse, out and dq. A sampled column j needs lse and out of all
rows, as the call gave them:
  p_i  = exp(s_ij - lse_i)                dv = sum p_i dout_i
  ds_i = p_i (dout_i v_j - dout_i out_i)  dk = sum d_raw_i q_i, with d_raw from ds
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
# An error is measured against at least this part of the terms of its sum, because terms that
# cancel leave their rounding.
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
        for finding in self.findings:
            name, error, _, where = finding
            line = f"{name:10}{error:10.2e}{finding.relative:10.1e}   {where}"
            if not finding.relative <= self.limit:  # also NaN
                line += f"   beyond {self.limit:.0e}"
            lines.append(line)
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
    """Check an attention where it stands: sampled rows of out and dq, sampled columns of dk and dv.

    Run the attention once, forward and gradient, for a random cotangent of out. Then compute the
    samples again in float64, in O(samples (T + S)): cheap enough for a training loop now and then,
    and at a million tokens. Not inside jit.

    Args:
      implementation: a name or None, as in `dot_product_attention`; or a function with the same
        arguments, for example
        `functools.partial(jax.nn.dot_product_attention, implementation="cudnn")`. A function does
        not return lse, so the chunked path computes it.
      query, key, value, bias, mask: as in `dot_product_attention`.
      samples: the number of rows, and of columns; with grouped heads, of all heads of a group.
      rng: a key of `jax.random` for the samples and the cotangent. Default: `jax.random.key(0)`.
      kwargs: more arguments of `dot_product_attention`, also `backward`, without dropout and sinks.

    Returns: `memeff.Audit`: `ok`, and `findings` (the largest error of each result, and where).
      Print it for a table.

    Raises: as the call itself does; TypeError inside jit, for dropout, and for sinks.

    Example:
      >>> x = jax.random.normal(jax.random.key(1), (1, 100, 2, 8))
      >>> audit("xla", x, x, x, is_causal=True, samples=8).ok
      True
    """
    # `backward` and `memory_limit` say how to compute, which the truth does not need.
    exact_kwargs = dict(kwargs)
    exact_kwargs.pop("backward", None)
    exact_kwargs.pop("memory_limit", None)
    arguments = chunked_arguments("audit", query, key, value, bias, mask, **exact_kwargs)
    call = prepare(arguments, run_attention)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(call.operands))
    if traced or call.problem.dropout is not None:
        raise TypeError("memeff.audit runs outside jit, on arrays, and without dropout. Omit both.")
    if rng is None:
        rng = jax.random.key(0)
    run_key, *sample_keys = jax.random.split(rng, 3)
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    ours = functools.partial(dot_product_attention, bias=bias, mask=mask, return_residual=True)
    shape = call.shape
    out_shape = (*shape.leads, shape.T, shape.N, shape.D)
    dout = jax.random.normal(run_key, out_shape, arrays[0].dtype)
    if callable(implementation):
        optional = {"bias": bias, "mask": mask}
        optional = {name: x for name, x in optional.items() if x is not None}
        run = functools.partial(implementation, **optional, **kwargs)
        out, gradients = _out_and_gradients(run, dout, arrays, returns_lse=False)
        _, lse = ours(*arrays, implementation="xla", **exact_kwargs)
    else:
        run = functools.partial(ours, implementation=implementation, **kwargs)
        (out, lse), gradients = _out_and_gradients(run, dout, arrays, returns_lse=True)
    return _compare_samples(call, (out, lse, *gradients), dout, sample_keys, samples)


def _out_and_gradients(run, dout: Array, arrays: list[Array], returns_lse: bool):
    """Return the results of `run` for `arrays`, and the gradients for the cotangent `dout`."""

    @jax.jit
    def both(dout, *arrays):
        results, pull = jax.vjp(run, *arrays)
        cotangents = (dout, jnp.zeros_like(results[1])) if returns_lse else dout
        cotangents = jax.tree.map(sharding.shard_like, cotangents, results)
        return results, pull(cotangents)

    return both(dout, *arrays)


def _compare_samples(call: Call, results, dout: Array, sample_keys, samples: int) -> Audit:
    """Compare sampled rows and columns of the results with float64.

    `results` are out, lse, dq, dk and dv in public layout.
    """
    shape = call.shape
    fold = functools.partial(fold_leads, shape)
    results, dout = jax.tree.map(fold, (results, dout))
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
    columns = []
    for column_key, size in zip(jax.random.split(key, 3), sizes, strict=True):
        indices = jax.random.randint(column_key, (samples,), 0, size)
        columns.append(np.asarray(indices))
    return np.stack(columns, 1)


@functools.partial(jax.jit, static_argnums=0)
def rows_of(problem: Problem, operands: Operands, dout: Array, samples: Array):
    """Return lse [n, G], out [n, G, D], dq [n, G, H] and the size of dq's terms in float64.

    `dout` is B T N D, `samples` [n, 3] as `sampled` returns them.
    """

    def one_row(sample):
        size = (1, operands.shape.S)
        tile = _cut_sample(problem, operands, sample, size, (), (dout,))
        s, pull = _logits(problem, tile)  # g 1 c
        m = s.max(-1, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0, m)  # a row that sees no key
        l = jnp.exp(s - m).sum(-1, keepdims=True)
        p = jnp.exp(s - m) / jnp.where(l == 0, 1, l)
        v = tile.operands.value[0, 0]
        do = tile.row_vectors[0][0, 0]  # g 1 d
        out = p @ v
        dp = do @ v.T
        delta = (do * out).sum(-1, keepdims=True)
        dq, _ = pull(p * (dp - delta))
        dq_size, _ = pull(_size_of_terms(p, do, v, out))
        lse = m + jnp.log(l)
        return lse[:, 0, 0], out[:, 0], dq[0, 0, :, 0], dq_size[0, 0, :, 0]

    return lax.map(one_row, samples)


@functools.partial(jax.jit, static_argnums=0)
def columns_of(
    problem: Problem,
    operands: Operands,
    out: Array,
    lse: Array,
    dout: Array,
    samples: Array,
):
    """Return dk [n, H] and dv [n, D] of sampled keys in float64, and the size of dk's terms.

    out and dout are B T N D, lse B T N.
    """
    lse = split_axis(lse, 2, operands.shape.K).transpose(0, 2, 3, 1)  # b k g t

    def one_column(sample):
        size = (operands.shape.T, 1)
        tile = _cut_sample(problem, operands, sample, size, (lse,), (dout, out))
        s, pull = _logits(problem, tile)  # g t 1
        do, o = (x[0, 0] for x in tile.row_vectors)  # g t d
        row_lse = tile.row_scalars[0][0, 0, :, :, None]  # g t 1
        p = jnp.where(row_lse == -jnp.inf, 0, jnp.exp(s - row_lse))
        v = tile.operands.value[0, 0]
        dp = do @ v.T
        delta = (do * o).sum(-1, keepdims=True)
        _, dk = pull(p * (dp - delta))
        dv = (p * do).sum((0, 1))
        _, dk_size = pull(_size_of_terms(p, do, v, o))
        return dk[0, 0, 0], dv, dk_size[0, 0, 0]

    return lax.map(one_column, samples)


def _size_of_terms(p: Array, do: Array, v: Array, out: Array) -> Array:
    """Return the size of the terms of p (do v' - do out').

    Rounding errs by a part of this size even where the terms cancel.
    """
    dp_square = (do**2) @ (v**2).T
    delta_square = ((do * out) ** 2).sum(-1, keepdims=True)
    return p * jnp.sqrt(dp_square + delta_square)


def _cut_sample(
    problem: Problem,
    operands: Operands,
    sample: Array,
    size: tuple[int, int],
    rows,
    like_query,
) -> Tile:
    """Cut one row, or one column, of one key head, in float64.

    Numbers that are not finite become 0, because nobody may see them.
    """
    b, k, token = sample
    start = (token, 0) if size[0] == 1 else (0, token)
    lengths = operands.shape.T, operands.shape.S
    sources = TileSources(operands, like_query, rows, lengths)
    tile_size = TileSize(1, 1, *size)
    tile = cut_tile(problem, sources, tile_size, True, (b, k), *start)

    def widen(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(jnp.float64)

    def clean(x):
        return jnp.where(jnp.isfinite(x), x, 0)

    arrays = tile.operands, tile.row_scalars, tile.row_vectors
    tile_operands, row_scalars, row_vectors = jax.tree.map(widen, arrays)
    query, key, value = map(clean, tile_operands[:3])
    tile_operands = tile_operands._replace(query=query, key=key, value=value)
    row_vectors = tuple(map(clean, row_vectors))
    return tile._replace(operands=tile_operands, row_scalars=row_scalars, row_vectors=row_vectors)


def _logits(problem: Problem, tile: Tile):
    """Return the logits G t c of the tile's head, and their pullback to its queries and keys."""

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
    row_places = []  # b t n
    for b, k, t in rows.tolist():
        for g in range(G):
            row_places.append((b, t, k * G + g))
    column_places = [(b, s, k) for b, k, s in columns.tolist()]
    row_index = tuple(np.asarray(row_places).T)
    column_index = tuple(np.asarray(column_places).T)
    true_lse, true_out, true_dq, dq_size = true_rows
    true_dk, true_dv, dk_size = true_columns

    def compare_rows(name, x, truth, least=0.0):
        actual = np.asarray(x[row_index]).reshape(len(row_places), -1)
        truth = np.asarray(truth).reshape(len(row_places), -1)
        return _compare(name, actual, truth, row_places, least)

    def compare_columns(name, x, truth, least=0.0):
        actual = np.asarray(x[column_index])
        return _compare(name, actual, np.asarray(truth), column_places, least)

    findings = (
        compare_rows("lse", lse, true_lse),
        compare_rows("out", out, true_out),
        compare_rows("query", dq, true_dq, PART * np.abs(dq_size).max(initial=0)),
        compare_columns("key", dk, true_dk, PART * np.abs(dk_size).max(initial=0)),
        compare_columns("value", dv, true_dv),
    )
    return Audit(findings, len(rows), dtype)


def _compare(
    name: str,
    actual: np.ndarray,
    truth: np.ndarray,
    places: list[tuple[int, ...]],
    least: float,
) -> Finding:
    """Return the largest error of `actual` [n, entries], whose rows are at `places`.

    Its scale is at least `least`.
    """
    actual = actual.astype(np.float64)
    truth = truth.astype(np.float64)
    # The lse of a row that sees no key is -inf in both.
    both_nan = np.isnan(actual) & np.isnan(truth)
    same = (actual == truth) | both_nan
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(actual - truth))
    error = np.where(np.isnan(error), np.inf, error)
    worst, entry = np.unravel_index(np.argmax(error), error.shape)
    finite = truth[np.isfinite(truth)]
    scale = max(np.abs(finite).max(initial=0), least)
    place = (*places[worst], int(entry))
    return Finding(name, float(error[worst, entry]), float(scale), place)
