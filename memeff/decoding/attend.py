"""Attend to keys and values that are stored in pages, or as 8-bit numbers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType

from memeff.arguments import Arguments
from memeff.attention_ad import attend
from memeff.call import prepare, run_attention, to_public
from memeff.device import Device, current_device, pretend_device
from memeff.implementations import Chosen
from memeff.inputs import kind_of, refuse_symbolic, to_array
from memeff.masking import key_range
from memeff.problem import Operands, Problem, sum_dtype
from memeff.query_positions import check_query_positions, nan_without_params
from memeff.shape import CallShape
from memeff.sharding import explicit_devices, vary_together
from memeff.stored import StoredKeys
from memeff.validate import check_logit_params, check_segments, check_window

ON_EXPLICIT_MESH = (
    "is on an Explicit mesh, which does not support keys that are stored in pages or in 8 bits. "
    "Use jax.shard_map or an Auto mesh."
)


@dataclasses.dataclass(frozen=True)
class _Static:
    """The arguments of a call that jit does not trace, the tree of all, and the kind of device."""

    structure: Any
    # of leaves, because 1 == True == 1.0; before them, because leaves of two kinds may not compare
    kinds: tuple[type, ...]
    leaves: tuple[Any, ...]  # None in the places of arrays
    device: Device


def _check_hashable(name: str, x: Any) -> Any:
    """Return x, which jit does not trace, if it can be the key of a compiled program."""
    try:
        hash(x)
    except TypeError:
        raise TypeError(
            f"{name} must be an array or hashable (it is fixed while tracing), got {kind_of(x)}."
        ) from None
    return x


def attend_stored(
    arguments: Arguments, key: StoredKeys, value: StoredKeys
) -> Array | tuple[Array, Array]:
    """Return what `dot_product_attention` does of the keys and values that `key`, `value` hold.

    `arguments.key` and `arguments.value` are ignored. The forward reads one tile at a time. A
    derivative reads all keys and values into arrays first.
    """
    if arguments.sequence_axis is not None:
        raise NotImplementedError(
            "sequence_axis does not support keys that are stored in pages or in 8 bits: give each "
            "device a cache of its own inside jax.shard_map, and combine with memeff.merge."
        )
    arrays_without_query = arguments._replace(query=0), key, value
    for x in jax.tree.leaves(arrays_without_query):
        if isinstance(x, jax.Array) and any(explicit_devices(x, n) > 1 for n in range(x.ndim)):
            raise NotImplementedError(f"An array of the call {ON_EXPLICIT_MESH}")
    # here, because values are known that `_attend_stored` only traces
    shape = CallShape.of(jnp.asarray(arguments.query), key, value)
    refuse_symbolic("A cache in pages or in 8 bits", S=shape.S)
    query_ids, kv_ids = check_segments(
        shape, arguments.query_segment_ids, arguments.key_value_segment_ids
    )
    dtype = sum_dtype(key.dtype)
    check_logit_params(shape, None, arguments.scale, arguments.logits_soft_cap, dtype)
    device = current_device(arguments.query)
    arguments = arguments._replace(
        key=0, value=0, query_segment_ids=query_ids, key_value_segment_ids=kv_ids
    )
    paths_and_leaves, structure = jax.tree.flatten_with_path(arguments)
    arrays = []
    rest = []
    for path, leaf in paths_and_leaves:
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        arrays.append(to_array(path[0].name, leaf) if is_array else None)
        rest.append(None if is_array else _check_hashable(path[0].name, leaf))
    _, right = check_window(arguments.local_window_size, arguments.is_causal)
    mask = arguments.mask_fn, arguments.mask_params
    check_query_positions(mask, arguments.q_offset, shape.T, arguments.query_seq_lengths, right)
    static = _Static(structure, tuple(map(type, rest)), tuple(rest), device)
    return _attend_stored(static, arrays, key, value)


@functools.partial(jax.jit, static_argnums=0)
def _attend_stored(
    static: _Static, arrays: list[Any], key: StoredKeys, value: StoredKeys
) -> Array | tuple[Array, Array]:
    """Check the call, choose its tiles, and run it."""
    pairs = zip(arrays, static.leaves, strict=True)
    leaves = [leaf if x is None else x for x, leaf in pairs]
    arguments: Arguments = jax.tree.unflatten(static.structure, leaves)
    # Arrays of the same sizes stand for keys and values until the call is checked. Nothing reads
    # them, so the compiled program does not have them.
    likes = [jnp.zeros(x.shape, x.dtype) for x in (key, value)]
    plain = arguments._replace(key=likes[0], value=likes[1])
    with pretend_device(*static.device):
        call = prepare(plain, run_attention, stored=(key, value))
    operands = call.operands
    mesh = jax.typeof(operands.query).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        raise NotImplementedError(f"query {ON_EXPLICIT_MESH}")
    want_lse = bool(arguments.return_residual)
    out, lse = _forward(call.chosen, want_lse, vary_together(operands))
    return to_public(call.shape, out, lse, arguments.query)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _forward(chosen: Chosen, want_lse: bool, operands: Operands) -> tuple[Array, Array | None]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T], or None for lse."""
    lse_for = "caller" if want_lse else None
    out, lse = chosen.module.forward(chosen.problem, chosen.schedule, operands, lse_for)
    results = out, lse.high if want_lse else None
    return nan_without_params(chosen.problem, operands, results)


@_forward.defjvp
def _forward_jvp(chosen: Chosen, want_lse: bool, primals: Any, tangents: Any) -> Any:
    """Return the results and their tangents, by the rules of keys that are arrays."""

    def read_all(operands: Operands) -> tuple[Array, Array | None]:
        key: Any = operands.key
        value: Any = operands.value
        # Tokens that no query sees may have no page. They would be NaN, and jax.debug_nans would
        # find that in what the forward keeps for the gradient.
        offset = chosen.problem.q_offset if operands.q_offset is None else operands.q_offset
        rows = operands.query.shape[1] if operands.q_lengths is None else operands.q_lengths
        start, end = seen_tokens(chosen.problem, operands.kv_lengths, offset, rows)
        cols = jnp.arange(key.shape[1], dtype=jnp.int32)[None]
        is_seen = (cols >= start[:, None]) & (cols < end[:, None])
        key, value = (jnp.where(is_seen[..., None, None], x.whole(), 0) for x in (key, value))
        return attend(chosen, want_lse, operands._replace(key=key, value=value))

    return jax.jvp(read_all, primals, tangents)


def seen_tokens(problem: Problem, lengths: Any, q_offset: Any, rows: Any) -> tuple[Any, Any]:
    """Return the first token [B] that a query of each sequence may see, and the end [B].

    `lengths` [B] are those of keys, and `rows` the number of valid queries, one for all or [B].
    With NumPy arrays the result is one. Masks and functions may hide more.
    """
    numpy: Any = np if isinstance(lengths, np.ndarray) else jnp
    start, end, _, _ = key_range(problem, q_offset, 0, rows - 1)
    start = numpy.broadcast_to(0 if start is None else start, lengths.shape)
    end = lengths if end is None else numpy.minimum(lengths, end)
    return start, numpy.where(rows > 0, end, 0)
