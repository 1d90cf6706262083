"""The contract: `dot_product_attention`, its arguments in the user's words and the walk from them to an implementation."""

from __future__ import annotations  # help() then shows ArrayLike and not the nine types that it is

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from memeff import arguments, auditing, compiling, dispatch, planning, sharding, statistics
from memeff.blocks import BlockMask
from memeff.differentiation import attend
from memeff.functions import Mask, Score, Transform
from memeff.problem import SEES_NOTHING, Device, Operands, Problem, check_sizes_known

Implementation = Literal["xla", "reference", "pallas"]
Backward = Literal["split", "fused", "fastest"]


class Options(TypedDict, total=False):
    """Keywords of `dot_product_attention` that Flax does not know, for functions that hand them on."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: Implementation | None
    backward: Backward | None
    logits_soft_cap: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    q_offset: ArrayLike
    score_fn: Callable[..., Any] | Score | None
    score_params: Any
    mask_fn: Callable[..., Any] | Mask | BlockMask | None
    mask_params: Any
    sinks: ArrayLike | None
    qk_transform: Callable[..., Any] | Transform | None
    qk_transform_params: Any
    chunk_size: int | tuple[int, int] | None
    memory_limit: int | str | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = ...,
    precision: lax.PrecisionLike = None,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    **options: Unpack[Options],
) -> Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    precision: lax.PrecisionLike = None,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    **options: Unpack[Options],
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = None,
    backward: Backward | None = None,
    return_residual: bool = False,
    logits_soft_cap: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    q_offset: ArrayLike = 0,
    score_fn: Callable[..., Any] | Score | None = None,
    score_params: Any = None,
    mask_fn: Callable[..., Any] | Mask | BlockMask | None = None,
    mask_params: Any = None,
    sinks: ArrayLike | None = None,
    qk_transform: Callable[..., Any] | Transform | None = None,
    qk_transform_params: Any = None,
    chunk_size: int | tuple[int, int] | None = None,
    memory_limit: int | str | None = None,
    precision: lax.PrecisionLike = None,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: None = None,
    dtype: None = None,
    module: None = None,
) -> Array | tuple[Array, Array]:
    r"""Exact attention, `softmax(cap(scale * query key^T) + bias) value`, without ever storing the T x S matrix.

    A superset of `jax.nn.dot_product_attention`. Flax's modules take `memeff.nn.attention_fn`.
    Memory: O(T + S) beyond inputs and outputs, forward and gradient; a `bias` or dense `mask` costs its own size.
    Differentiable in both modes and to every order, in linear memory: by query, key, value, params of functions, sinks,
    and by bias, scale and logits_soft_cap where they are arrays.

    Args:
      query: [*B, T, N, H], float. Leading dims may be none or many.
      key: [*B, S, K, H], same dtype as `query`. N must be a multiple of K; query head n reads key head n // (N // K).
      value: [*B, S, K, D], same dtype as `query`. D need not be H.
      bias: broadcastable to [*B, N, T, S], float, added to the logits. -inf, or the lowest finite number of its dtype,
        hides the key as a mask would.
      mask: broadcastable to [*B, N, T, S], boolean, True = may attend.
      scale: multiplies the dot products; a number or a scalar array. Default 1 / sqrt(H).
      is_causal: query row i sees keys up to position i + q_offset (top-left aligned, as jax.nn).
      query_seq_lengths: [*B], integers, tokens: rows past it give 0.
      key_value_seq_lengths: [*B], integers, tokens: keys past it are seen by nobody. Traced lengths cannot be checked
        and count as at most S.
      local_window_size: (left, right) in tokens, None for no bound, both sides inclusive; an int means both. With
        `is_causal` the smaller right holds.
      implementation: None (memeff chooses), "xla" (chunked, any device), "reference" (quadratic), "pallas" (kernels for
        Hopper GPUs; `memeff.explain` says which calls they run).
      backward: of kernels. "split", the default: a kernel for the query's gradient and one for those of key and value;
        bits repeat. "fused": one kernel, five products a tile instead of seven; the query's gradient is added up in
        an order that differs from run to run, in a float32 array as large as itself. The gradients are equally exact.
        "fastest": fused where that was measured to be faster and fits in memory_limit, else split; never refused.
      return_residual: also return lse.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c), before bias and mask.
      query_segment_ids, key_value_segment_ids: [*B, T] and [*B, S], integers: a query sees the keys of its own segment.
        The first alone serves both where T = S.
      q_offset: int, or integers [*B]: the position of query row 0 among the keys, for `is_causal` and windows.
      score_fn: (score, batch, head, q_pos, k_pos, params) -> score, of JAX's functions: for scalars, the logit of one pair
        after scale and soft cap, and int32 numbers (positions as in windows, `batch` of all leading dims together). Or a
        `memeff.Score`, as those of `memeff.scores`.
      score_params: a pytree of arrays for it; floats get their gradients, in their own shapes.
      mask_fn: (batch, head, q_pos, k_pos, params) -> bool, True = may attend. Or a `memeff.Mask`, as those of
        `memeff.masks`, which `&`, `|` and `~` combine; or a `memeff.block_mask` of one, whose hidden tiles are skipped.
      mask_params: a pytree of arrays for it, without gradients.
      sinks: [N], float, nats: a logit for each head that takes part in the softmax and has no value, as one more key whose
        value is 0. lse is that of the keys alone. -inf is no sink.
      qk_transform: (x, position, which, params) -> x, of one row x [H] of a query or key (`which`, "query" or "key") at its
        position: rotary embeddings, normalisation. Done for each tile and again in the backward, so that no transformed copy
        is stored. Or a `memeff.Transform`, as those of `memeff.transforms`.
      qk_transform_params: a pytree of arrays for it; floats get their gradients.
      chunk_size: rows and columns of the tile of logits that exists at a time, an int or (query, key). Default: by a
        measurement, see `memeff.dispatch`.
      memory_limit: bytes, or a text such as "512MiB": what forward and gradient may take beyond inputs and outputs, with
        smaller tiles than the default where need be; what does not fit is refused, with a figure that does. A call near
        its limit is compiled while it is traced, once for all calls like it, to ask XLA. `memeff.memory_limit` sets it
        for many calls.
      precision: of the products, as `jax.lax.dot_general` takes it.
      dropout_rng: a key of `jax.random`, wanted where dropout_rate > 0. For the same key the mask is Flax's: a
        function of coordinates, so of no chunk size.
      dropout_rate: the chance, in [0, 1), that a probability is dropped. The others are divided by 1 - dropout_rate.
      broadcast_dropout: one mask for all batch entries and heads, as Flax's default. False: a mask for each.
      deterministic, dtype, module: not taken. Flax's modules pass them: give those `memeff.nn.attention_fn`.

    Returns:
      [*B, T, N, D] in the dtype of `query`; rows that see no key are 0. With `return_residual`, also
      lse [*B, T, N], float32 (float64 for float64), natural log; -inf for rows that see no key; differentiable.

    Raises:
      ValueError: shapes or values disagree, or `memory_limit` is too low. The message names the argument, what came and
        what was expected.
      TypeError: a dtype or a kind is wrong.
      NotImplementedError: a legal call that the requested `implementation` cannot run; the message says why.

    Example:
      >>> x = jnp.ones((2, 7, 4, 8))
      >>> dot_product_attention(x, x, x, local_window_size=(2, 0)).shape
      (2, 7, 4, 8)

    Source: Rabe & Staats 2021 (arXiv:2112.05682), section 2; Dao 2023 (arXiv:2307.08691), section 3.1.
    """
    return _attention(locals())


def _attention(given: Mapping[str, Any], chosen: dispatch.Chosen | None = None):
    """What `dot_product_attention` returns, for its arguments by name; `chosen`: in these tiles."""
    call = _normalised(given, _attention, chosen)
    how = call.module, call.problem, bool(given["return_residual"])
    out, lse = sharding.on_their_mesh(attend, how, call.operands)
    out = arguments.unfold(call.shape, out)
    if lse is None:
        return out
    return out, _at_the_door(call, lse)


class _Call(NamedTuple):
    """A call in our own words."""

    shape: arguments.Shape
    problem: Problem
    operands: Operands
    module: ModuleType  # the implementation


def _normalised(given: Mapping[str, Any], run: Callable[..., Any], chosen: dispatch.Chosen | None = None) -> _Call:
    """From the arguments of `dot_product_attention`, by name, each of them checked.

    `run(given, chosen)` is what is done with them: where a memory limit is near, it is compiled, to ask XLA for its bytes.
    """
    a = SimpleNamespace(**given)
    arguments.check_not_flaxes(deterministic=a.deterministic, dtype=a.dtype, module=a.module)
    query, key, value = arguments.check_arrays(a.query, a.key, a.value)
    sharding.check_layout(query, key, value)
    shape = arguments.Shape.of(query, key, value)
    terms, (scale, soft_cap) = arguments.check_terms(shape, a.bias, a.scale, a.logits_soft_cap)
    offset, static_offset = arguments.check_offset(shape, a.q_offset)
    left, right = arguments.check_window(a.local_window_size, a.is_causal)
    q_segments, kv_segments = arguments.check_segments(shape, a.query_segment_ids, a.key_value_segment_ids)
    accumulator = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    score_fn, score_floats, score_rest = arguments.check_function(shape, "score_fn", a.score_fn, a.score_params, accumulator)
    blocks, mask_fn = arguments.check_blocks(shape, a.mask_fn, a.q_offset)
    mask_fn, *mask_params = arguments.check_function(shape, "mask_fn", mask_fn, a.mask_params, accumulator)
    transform, transform_floats, transform_rest = arguments.check_transform(a.qk_transform, a.qk_transform_params, query)
    sinks = arguments.check_sinks(shape, a.sinks, accumulator)
    dropout, dropout_key = arguments.check_dropout(a.dropout_rng, a.dropout_rate, a.broadcast_dropout)
    problem = Problem(
        left=left,
        right=right,
        q_offset=static_offset,
        scale=scale,
        soft_cap=soft_cap,
        dropout=dropout,
        precision=arguments.check_precision(a.precision),
        score_fn=score_fn,
        mask_fn=mask_fn,
        blocks=blocks,
        qk_transform=transform,
        backward=arguments.check_backward(a.backward),
    )
    operands = Operands(
        *arguments.fold(shape, query, key, value),
        terms=terms._replace(score=score_floats, transform=transform_floats, sinks=sinks),
        mask=arguments.check_mask(shape, a.mask),
        q_lengths=arguments.check_lengths(shape, "query_seq_lengths", a.query_seq_lengths, "T", shape.T),
        kv_lengths=arguments.check_lengths(shape, "key_value_seq_lengths", a.key_value_seq_lengths, "S", shape.S),
        q_offset=offset,
        q_segments=q_segments,
        kv_segments=kv_segments,
        dropout_key=dropout_key,
        score_rest=score_rest,
        mask_params=tuple(lax.stop_gradient(x) for kind in mask_params for x in kind),
        transform_rest=transform_rest,
    )
    if dropout is not None:
        check_sizes_known(operands, "Dropout")
    if chosen is not None:
        return _Call(shape, chosen.problem, operands, chosen.module)
    limit = arguments.bytes_of("memory_limit", a.memory_limit) or dispatch.memory_limit_of_program.value
    chunks = arguments.check_chunk_size(a.chunk_size)
    compiled = functools.partial(compiling.temp_bytes, run, given)
    chosen = dispatch.select_implementation(problem, operands, a.implementation, chunks, limit, compiled)
    return _Call(shape, chosen.problem, operands, chosen.module)


def _at_the_door(call: _Call, rows: Array) -> Array:
    """[*B, T, N] of lse or the like B K G T; -inf for rows that see no key."""
    rows = arguments.unfold(call.shape, rows)
    return jnp.where(rows == SEES_NOTHING, -jnp.inf, rows)


def attention_statistics(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **how: Any,
) -> statistics.Statistics:
    """out and lse as `dot_product_attention`, and of each row its entropy, largest logit and expected distance.

    In one pass over the logits and in linear memory, by the chunked path; differentiable in every order. Of probabilities
    before dropout. The gradient of the largest logit is shared by those that equal it to rounding.

    Args: those of `dot_product_attention` but implementation, backward, return_residual and sinks.

    Returns: `memeff.Statistics`: out [*B, T, N, D]; lse, entropy (nats), largest, distance (tokens) [*B, T, N].

    Raises: as the call itself does; TypeError for an argument that is not one of those.

    Example:
      >>> x = jnp.ones((1, 4, 1, 8))
      >>> print(attention_statistics(x, x, x, is_causal=True).distance[0, :, 0])
      [0.  0.5 1.  1.5]
    """
    return _statistics(_bound("attention_statistics", query, key, value, bias, mask, how))


def _statistics(given: Mapping[str, Any], chosen: dispatch.Chosen | None = None) -> statistics.Statistics:
    call = _normalised(given, _statistics, chosen)
    out, *rows = sharding.on_their_mesh(statistics.measured, (call.problem,), call.operands)
    return statistics.Statistics(arguments.unfold(call.shape, out), *(_at_the_door(call, x) for x in rows))


def key_mass(
    query: ArrayLike, key: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, **how: Any
) -> Array:
    """How much each key receives: the sum of its probabilities over all queries, [*B, S, N] in float32 (float64).

    In linear memory, by the chunked path: one pass for lse, one for the sums; differentiable in every order.

    Args: those of `dot_product_attention` but value, implementation, backward, return_residual and sinks.

    Raises: as `dot_product_attention`; TypeError for an argument that is not one of those.

    Example:
      >>> x = jnp.ones((1, 4, 1, 8))
      >>> print(key_mass(x, x)[0, :, 0])
      [1. 1. 1. 1.]
    """
    return _key_mass(_bound("key_mass", query, key, jnp.asarray(key)[..., :1], bias, mask, how))


def _key_mass(given: Mapping[str, Any], chosen: dispatch.Chosen | None = None) -> Array:
    call = _normalised(given, _key_mass, chosen)
    found = sharding.on_their_mesh(statistics.key_mass, (call.problem,), call.operands)
    return arguments.unfold(call.shape, found)


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
) -> auditing.Audit:
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
    of_truth = {name: x for name, x in how.items() if name not in ("backward", "memory_limit")}  # how, not what
    call = _normalised(_bound("audit", query, key, value, bias, mask, of_truth), _attention)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(call.operands)) or call.problem.dropout is not None:
        raise TypeError("memeff.audit runs outside jit, on arrays, and without dropout: leave both away.")
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
        return out, pull(jax.tree.map(sharding.laid_out_as, cotangents, out))

    out, gradients = both(dout, *arrays)
    out, lse = out if known else (out, ours(*arrays, implementation="xla", **of_truth)[1])
    apart = lambda x, length, *heads: x.reshape(shape.B, length, *heads, *x.shape[len(shape.leads) + 2 :])
    of_query, of_key = (shape.T, shape.K, shape.G), (shape.S, shape.K)
    sizes = zip((*[of_query] * 3, *[of_key] * 2), (out, lse, *gradients), strict=True)
    found = [apart(x, *size) for size, x in sizes]
    operands, found, dout = sharding.on_auto_mesh((call.operands, found, apart(dout, *of_query)))
    rows, columns = (
        auditing.sampled(k, (shape.B, shape.K, n), samples) for k, n in zip(keys[1:], of_query[:1] + of_key[:1], strict=True)
    )
    inner = lambda x: jnp.moveaxis(x, 1, 3)
    with jax.set_mesh(None):
        with jax.enable_x64(True):
            true_rows = auditing.rows_of(call.problem, operands, inner(dout), rows)
            of_rows = (inner(x) for x in found[:2])
            true_columns = auditing.columns_of(call.problem, operands, *of_rows, inner(dout), columns)
        return auditing.report(found, true_rows, true_columns, rows, columns, samples, arrays[0].dtype.name)


def _bound(name: str, query, key, value, bias, mask, how: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the chunked path, by name."""
    others = {"implementation", "backward", "return_residual", "sinks"}
    if not_taken := sorted(others & how.keys()):
        raise TypeError(f"memeff.{name} does not take {', '.join(not_taken)}: leave it away.")
    bound = inspect.signature(dot_product_attention).bind(query, key, value, bias, mask, implementation="xla", **how)
    bound.apply_defaults()
    return bound.arguments


def explain(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **how: Any) -> str:
    """Which implementation runs this call of `dot_product_attention`, how, and why each other one does not.

    Nothing is computed.

    Args: those of `dot_product_attention` but `implementation`; for any array also a `jax.ShapeDtypeStruct`.

    Raises: as the call itself does.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> "of 64 visited" in explain(x, x, x, is_causal=True)
      True
    """
    return dispatch.reasons(*_dispatched("explain", dict(query=query, key=key, value=value, bias=bias, mask=mask, **how)))


def plan(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    device: Any = None,
    memory: Any = None,
    compile: bool = False,
    **how: Any,
) -> planning.Plan:
    """What this call of `dot_product_attention` will take: memory, floating point operations, tiles; print it for a table.

    Nothing is computed or allocated. Bytes are estimates, for most calls between half and twice what XLA reports once
    the call is compiled; on TPUs they are told by the rule for GPUs, which nobody has checked there. With `compile` the
    call is compiled, and bytes are what XLA reports.

    Args: those of `dot_product_attention` but `implementation`; for any array also a `jax.ShapeDtypeStruct`. And:
      device: a name of `memeff.planning.DEVICES` ("cpu", "gpu", "H200"), or a `jax.Device`, also one that is described alone
        (of `jax.experimental.topologies`). Default: JAX's first.
      memory: bytes, or a text such as "80GiB", in which the longest sequence is to fit. Default: the device's, where known.
      compile: compile forward and gradient, some seconds; the device must be here, or described.

    Raises: as the call itself does; ValueError for a device that is not known, or for which nothing can be compiled here.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> plan(x, x, x, is_causal=True, device="cpu").tiles_visited
      36
    """
    on, has = planning.check_device(device)
    given = dict(query=query, key=key, value=value, bias=bias, mask=mask, **how)
    with dispatch.as_if_on(*on):
        chosen = _dispatched("plan", given)
        found = _bytes_as_compiled(given, chosen, device, on) if compile else None
        return planning.make(*chosen, arguments.bytes_of("memory", memory) or has, found)


def _bytes_as_compiled(given: dict[str, Any], chosen: tuple[Problem, Operands, str], device: Any, on: Device):
    """What XLA says of a call that `_dispatched` found."""
    problem, _, name = chosen
    bound = inspect.signature(dot_product_attention).bind(**given)
    bound.apply_defaults()
    target = planning.compiles_for(device, on)
    return compiling.temp_bytes(_attention, bound.arguments, dispatch.Chosen(problem, dispatch.MODULES[name]), target)


def _dispatched(name: str, given: dict[str, Any]) -> tuple[Problem, Operands, str]:
    """What dispatch sees of a call (of arrays only shapes), and the implementation that it chooses."""
    if "implementation" in given:
        raise TypeError(f"memeff.{name} tells what memeff would choose: leave implementation= away.")
    floats, rest, join, _ = compiling.parts(given)
    with dispatch.watch() as calls:
        jax.eval_shape(lambda *arrays: dot_product_attention(**join(*arrays)), floats, rest)
    return calls[0]
