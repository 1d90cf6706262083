"""Check an attention against float64 where it stands, in the time of sampled rows and columns."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from memeff import sharding
from memeff.arguments import Arguments
from memeff.attention import dot_product_attention
from memeff.call import prepare, prepare_sharded, run_attention
from memeff.diagnostics import float64
from memeff.diagnostics.bind import exact_arguments
from memeff.diagnostics.float64 import Inputs, Placement
from memeff.inputs import check_size, kind_of
from memeff.problem import Operands, Problem, sum_dtype
from memeff.sequence.layout import sequence_positions
from memeff.shape import CallShape, round_up

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
    # batch entry (of all leading dims together), token, head, and entry; of a sharded sequence, the
    # token is an index in the order of its layout
    where: tuple[int, ...]
    device_errors: tuple[float, ...]  # of the tokens of each device of a sharded sequence

    @property
    def relative(self) -> float:
        return self.relative_of(self.error)

    def relative_of(self, error: float) -> float:
        """Return an error as a part of the scale."""
        return error / self.scale if self.scale else error


@dataclasses.dataclass(frozen=True)
class Audit:
    """The result of `memeff.audit`. Its `str` is a table.

    Attributes:
      findings: for lse, out and the gradients of query, key and value: `name`, the largest `error`,
        the same `relative` to the truth, and `where` it is (batch entry, token, head, entry).
      samples: the number of sampled rows, and of sampled columns.
      dtype: the dtype of the query.
      axes: the mesh axes over which the sequence is sharded; () if it is not.
      largest_lse: the largest |lse| of the sampled rows, in float64.
    """

    findings: tuple[Finding, ...]
    samples: int
    dtype: str
    axes: tuple[str, ...] = ()
    largest_lse: float = 0.0

    @property
    def limit(self) -> float:
        """The largest relative error that counts as rounding."""
        return LIMITS[self.dtype] + self.rounding_of_logits

    @property
    def rounding_of_logits(self) -> float:
        """The relative error of a probability whose logit and lse are rounded."""
        return float(jnp.finfo(sum_dtype(self.dtype)).eps) * self.largest_lse

    @property
    def ok(self) -> bool:
        """True if no error is larger than `limit`."""
        return all(finding.relative <= self.limit for finding in self.findings)

    @property
    def bad_devices(self) -> tuple[int, ...]:
        """The devices of a sharded sequence on which some error is larger than `limit`.

        Their numbers follow the order of the sequence. () if the sequence is not sharded.
        """
        devices = set()
        for finding in self.findings:
            devices.update(self._bad_devices(finding))
        return tuple(sorted(devices))

    def _bad_devices(self, finding: Finding) -> list[int]:
        """Return the devices on which the error of one result is more than rounding."""
        errors = enumerate(finding.device_errors)
        return [device for device, x in errors if not finding.relative_of(x) <= self.limit]

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "NOT ok"
        samples = f"{self.samples} rows and columns in float64"
        if self.axes:
            devices = len(self.findings[0].device_errors)
            axes = " and ".join(f'"{axis}"' for axis in self.axes)
            samples += f", {self.samples // devices} on each of {devices} devices along {axes}"
        lines = [
            f"{samples}, {self.dtype}: {verdict}",
            f"{'':10}{'error':>10}{'relative':>10}   where (batch, token, head, entry)",
        ]
        for finding in self.findings:
            line = f"{finding.name:10}{finding.error:10.2e}{finding.relative:10.1e}"
            line += f"   {finding.where}"
            if not finding.relative <= self.limit:  # also NaN
                line += f"   beyond {self.limit:.0e}"
                devices = self._bad_devices(finding)
                if devices:
                    line += f" on device{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"
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
    """Check an attention on your arrays: sampled rows of out and dq, and columns of dk and dv.

    Run the attention once, forward and gradient, for a random cotangent of out. Then compute the
    samples again in float64. This takes O(samples (T + S)), so it works at a million tokens, and
    now and then in a training loop. It does not run inside jit.

    A sequence that is sharded over devices is checked on each of them, and stays sharded: pass
    whole arrays, outside of shard_map. The result then names the devices with bad rows or columns,
    by their number along the sequence, and counts tokens in the order of `sequence_layout`.

    Args:
      implementation: a name or None, as in `dot_product_attention`; or a function with the same
        arguments, for example
        `functools.partial(jax.nn.dot_product_attention, implementation="cudnn")`. A function does
        not return lse, so the chunked path computes it.
      query, key, value, bias, mask: as in `dot_product_attention`. The truth counts NaN and Inf in
        query, key and value as 0, so rows that see them are reported as errors.
      samples: the number of rows, and of columns; with grouped heads, of all heads of a group. It
        is rounded up so that all devices of a sharded sequence have the same number of samples.
      rng: a key of `jax.random` for the samples and the cotangent. Default: `jax.random.key(0)`.
      kwargs: more arguments of `dot_product_attention`, also `backward`, without dropout.
        An `implementation` that is a function gets them too, also those of a sharded sequence.

    Returns: `memeff.Audit`: `ok`, `findings` (the largest error of each result, and where) and
      `bad_devices`. Print it for a table.

    Raises: as the call itself does; TypeError inside jit, and for dropout; ValueError for arrays
      without queries, keys or values.

    Example:
      >>> x = jax.random.normal(jax.random.key(1), (1, 100, 2, 8))
      >>> audit("xla", x, x, x, is_causal=True, samples=8).ok
      True
    """
    samples = check_size("samples", samples)
    # `backward` and `memory_limit` say how to compute, which the truth does not need.
    exact_kwargs = dict(kwargs)
    exact_kwargs.pop("backward", None)
    exact_kwargs.pop("memory_limit", None)
    arguments = exact_arguments("audit", query, key, value, bias, mask, **exact_kwargs)
    call = _prepare(arguments)
    sizes = {letter: getattr(call.shape, letter) for letter in "BTSNKD"}
    if 0 in sizes.values():
        words = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        raise ValueError(f"memeff.audit has nothing to sample: {words} must be at least 1.")
    if rng is None:
        rng = jax.random.key(0)
    try:
        run_key, *sample_keys = jax.random.split(rng, 3)
    except (TypeError, ValueError) as e:
        message = f"rng must be one key of jax.random.key or PRNGKey, got {kind_of(rng)}."
        raise TypeError(message) from e
    dout = _draw_cotangent(run_key, call)
    arrays = call.arrays
    ours = functools.partial(dot_product_attention, bias=bias, mask=mask, return_residual=True)
    if callable(implementation):
        optional = {"bias": bias, "mask": mask}
        optional = {name: x for name, x in optional.items() if x is not None}
        run = functools.partial(implementation, **optional, **kwargs)
        out, gradients = _out_and_gradients(run, dout, arrays, returns_lse=False)
        _, lse = ours(*arrays, implementation="xla", **exact_kwargs)
    else:
        run = functools.partial(ours, implementation=implementation, **kwargs)
        (out, lse), gradients = _out_and_gradients(run, dout, arrays, returns_lse=True)
    return _compare_samples(call, (out, lse, *gradients, dout), sample_keys, samples)


class _Call(NamedTuple):
    """A checked call, its arrays, and where they lie."""

    arrays: list[Array]  # query, key and value, as they came
    shape: CallShape
    problem: Problem
    operands: Operands
    placement: Placement
    positions: tuple[np.ndarray, np.ndarray]  # of the queries [T] and keys [S], in their order


def _prepare(arguments: Arguments) -> _Call:
    """Check each argument, and find where the arrays lie."""
    axes = sharding.sequence_axes(arguments.sequence_axis, arguments.query)
    layout = arguments.sequence_layout
    if axes:
        shape, problem, operands, on_mesh, *_ = prepare_sharded(arguments, axes)
        # each sample has its own position instead
        problem = dataclasses.replace(problem, whole=None)
        operands = operands._replace(origin=None)
        devices = on_mesh.devices[0]
    else:
        shape, problem, operands, _ = prepare(arguments, run_attention)
        devices = 1
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(operands))
    if traced:
        raise TypeError("memeff.audit runs outside jit, because it needs the numbers.")
    if problem.dropout is not None:
        raise TypeError("memeff.audit runs without dropout. Omit dropout_rate.")
    arrays = [jnp.asarray(x) for x in (arguments.query, arguments.key, arguments.value)]
    placement = float64.find_placement(axes, arrays) if axes else Placement()
    lengths = shape.T, shape.S
    q_pos, k_pos = (sequence_positions(length, devices, layout) for length in lengths)
    return _Call(arrays, shape, problem, operands, placement, (q_pos, k_pos))


def _draw_cotangent(key: Array, call: _Call) -> Array:
    """Return a random cotangent of out [*B, T, N, D], laid out like a sharded query."""
    query = call.arrays[0]
    shape = (*call.shape.leads, call.shape.T, call.shape.N, call.shape.D)
    draw = functools.partial(jax.random.normal, shape=shape, dtype=query.dtype)
    if call.placement.mesh is None:
        return draw(key)
    if isinstance(query.sharding, NamedSharding) and any(query.sharding.spec):
        mesh = query.sharding.mesh
        spec = query.sharding.spec[: query.ndim - 1]
    else:
        mesh = call.placement.mesh
        spec = (*[None] * len(call.shape.leads), call.placement.axes.tokens)
    return jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec(*spec)))(key)


def _out_and_gradients(run, dout: Array, arrays: list[Array], returns_lse: bool):
    """Return the results of `run` for `arrays`, and the gradients for the cotangent `dout`."""

    @jax.jit
    def both(dout, *arrays):
        results, pull = jax.vjp(run, *arrays)
        cotangents = (dout, jnp.zeros_like(results[1])) if returns_lse else dout
        cotangents = jax.tree.map(sharding.shard_like, cotangents, results)
        return results, pull(cotangents)

    return both(dout, *arrays)


def _compare_samples(call: _Call, results, sample_keys, samples: int) -> Audit:
    """Compare sampled rows and columns of the results with float64.

    `results` are out, lse, dq, dk, dv and dout in public layout.
    """
    _, shape, problem, operands, placement, positions = call
    axes = placement.axes.tokens
    devices = 1
    if placement.mesh is not None:
        devices = math.prod(placement.mesh.shape[axis] for axis in axes)
    samples = round_up(samples, devices)
    results = [sharding.fold_leads(shape, x) for x in results]
    inputs = Inputs(operands, *results, *map(jnp.asarray, positions))
    inputs = float64.lay_out(placement, inputs)
    with jax.set_mesh(None):  # the caller's mesh is not that of these arrays
        rows = float64.sampled(sample_keys[0], (shape.B, shape.K, shape.T), samples, devices)
        columns = float64.sampled(sample_keys[1], (shape.B, shape.K, shape.S), samples, devices)
        with jax.enable_x64(True):
            of_rows = float64.compute(float64.one_row, problem, placement, inputs, rows)
            of_columns = float64.compute(float64.one_column, problem, placement, inputs, columns)
        of_rows, of_columns = jax.tree.map(np.asarray, (of_rows, of_columns))
    row_places = []  # b t n
    for b, k, t in rows.tolist():
        for g in range(shape.G):
            row_places.append((b, t, k * shape.G + g))
    column_places = [(b, s, k) for b, k, s in columns.tolist()]
    named = devices if axes else 0
    findings = (
        *_findings(of_rows, Samples(row_places, shape.T // devices, named)),
        *_findings(of_columns, Samples(column_places, shape.S // devices, named)),
    )
    _, truth, _ = of_rows  # not the lse of the call, which may be wrong
    largest_lse = float(np.abs(truth.lse[np.isfinite(truth.lse)]).max(initial=0))
    return Audit(findings, samples, operands.query.dtype.name, axes, largest_lse)


class Samples(NamedTuple):
    """The positions of samples, and their device in a sharded sequence."""

    places: list[tuple[int, ...]]  # batch entry, token and head
    tokens: int  # of a device
    devices: int  # 0: the sequence is not sharded


def _findings(results: Any, samples: Samples) -> list[Finding]:
    """Return the findings of rows, or of columns, as `one_row` and `one_column` return them."""
    actual, truth, size_of_terms = results
    findings = []
    for name in actual._fields:
        cancels = name in ("query", "key")
        least = PART * np.abs(size_of_terms).max(initial=0) if cancels else 0.0
        findings.append(_compare(name, getattr(actual, name), getattr(truth, name), samples, least))
    return findings


def _compare(
    name: str, actual: np.ndarray, truth: np.ndarray, samples: Samples, least: float
) -> Finding:
    """Return the largest error of `actual`, whose samples are at `samples`.

    Its scale is at least `least`.
    """
    places, tokens, devices = samples
    truth = truth.reshape(len(places), -1)
    error = absolute_errors(actual.reshape(truth.shape), truth)
    worst, entry = np.unravel_index(np.argmax(error), error.shape)
    finite = truth[np.isfinite(truth)]
    scale = max(np.abs(finite).max(initial=0), least)
    place = (*places[worst], int(entry))
    owners = np.array([token // tokens for _, token, _ in places])
    largest = [float(error[owners == device].max(initial=0)) for device in range(devices)]
    return Finding(name, float(error[worst, entry]), float(scale), place, tuple(largest))


def absolute_errors(actual: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Return |actual - truth| in float64: 0 where both are the same, also NaN or an infinity.

    The lse of a row that sees no key is -inf in both. An error that is NaN becomes inf.
    """
    actual, truth = (x.astype(np.float64) for x in (actual, truth))
    same = (actual == truth) | (np.isnan(actual) & np.isnan(truth))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(actual - truth))
    return np.where(np.isnan(error), np.inf, error)
