"""Calls of a sequence that is sharded over CPU devices, beside one device. This module has no test.

call = KINDS["causal"]            # keyword arguments, of whole sequences in their own order
found = results(call, 4, "zigzag", "ring")    # out, lse, gradients and tangents, by name
expected = results(call, 1)
assert_near(found, expected, 4)   # on every device
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import memeff
from memeff import dot_product_attention, masks, scores, transforms

f32 = np.float32
B, H, D = 2, 6, 3


class Call(NamedTuple):
    """A call: sizes, what is fixed, and arrays by the name of their argument."""

    T: int
    S: int
    static: dict[str, Any]
    arrays: dict[str, np.ndarray]


# letters of the dims of arguments, of whole calls
DIMS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnts",
    "mask": "bnts",
    "query_segment_ids": "bt",
    "key_value_segment_ids": "bs",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "q_offset": "b",
    "sinks": "n",
}


def make_call(kind: str, devices: int, N: int = 4, K: int = 2, dtype=f32) -> Call:
    """Return a call whose lengths `devices` can share, in every layout."""
    rng = np.random.default_rng(len(kind))
    T = S = 6 * devices
    static: dict[str, Any] = {}
    arrays: dict[str, np.ndarray] = {}

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    for feature in kind.split(", "):
        match feature:
            case "full":
                pass
            case "causal":
                static["is_causal"] = True
            case "window":
                static["local_window_size"] = (5, 0)
            case "wide window":
                static["local_window_size"] = (4 * devices, 7)
            case "cross":
                S = 10 * devices
            case "lengths":
                arrays["query_seq_lengths"] = np.array([T - 5, T // 2], np.int32)
                arrays["key_value_seq_lengths"] = np.array([S // 3, S - 1], np.int32)
            case "offset":
                static["q_offset"] = 3
            case "offsets":
                arrays["q_offset"] = np.array([-2, 7], np.int32)
            case "segments":
                arrays["query_segment_ids"] = np.sort(rng.integers(0, 3, (B, T))).astype(np.int32)
                arrays["key_value_segment_ids"] = np.sort(rng.integers(0, 3, (B, S))).astype(
                    np.int32
                )
            case "bias":
                arrays["bias"] = normal(B, N, T, S)
            case "row bias":
                arrays["bias"] = normal(1, N, T, 1)
            case "key bias":
                arrays["bias"] = normal(B, 1, 1, S)
            case "mask":
                arrays["mask"] = rng.random((1, N, T, S)) < 0.6
            case "shared mask":
                arrays["mask"] = rng.random((B, 1, 1, S)) < 0.6
            case "soft cap":
                static["logits_soft_cap"] = 2.0
            case "arrays":
                arrays["scale"] = np.array(0.4, dtype)
                arrays["logits_soft_cap"] = np.array(1.5, dtype)
            case "sinks":
                arrays["sinks"] = normal(N)
            case "dropout":
                static |= dict(dropout_rate=0.3, broadcast_dropout=False)
                arrays["dropout_rng"] = np.array([1, 2], np.uint32)
            case "shared dropout":
                static["dropout_rate"] = 0.3
                arrays["dropout_rng"] = np.array([3, 4], np.uint32)
            case "score_fn":
                static["score_fn"] = _score
                arrays["score_params"] = normal(N, T)
            case "mask_fn":
                static["mask_fn"] = _mask
                arrays["mask_params"] = rng.integers(0, 4, (B, S)).astype(np.int32)
            case "alibi":
                static["score_fn"] = scores.alibi(np.linspace(0.1, 0.4, N, dtype=dtype))
            case "rotary":
                static["qk_transform"] = transforms.rotary()
            case "transform":
                static["qk_transform"] = _transform
                arrays["qk_transform_params"] = normal(H)
            case "block mask":
                mask = masks.causal() & ~masks.dilated(3)
                static["mask_fn"] = memeff.block_mask(mask, T, S, block_size=4)
            case _:
                raise KeyError(feature)
    arrays |= {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, D),
    }
    return Call(T, S, static, arrays)


def _score(score, batch, head, q_pos, k_pos, params):
    return score + params[head, q_pos] * jnp.sin(k_pos + 1.0 * batch).astype(score.dtype)


def _mask(batch, head, q_pos, k_pos, params):
    return (params[batch, k_pos] + q_pos + head) % 4 != 0


def _transform(x, position, which, params):
    return x + params * jnp.cos(position).astype(x.dtype)


def is_float(x) -> bool:
    """Return True if x has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def mesh_of(devices: int, kind=AxisType.Auto) -> Mesh:
    """Return a mesh of the first CPU devices along one axis."""
    return Mesh(np.array(jax.devices()[:devices]), ("seq",), axis_types=(kind,))


def specs(arrays: dict[str, Any]) -> dict[str, P]:
    """Return how arguments are sharded: queries and keys, but not the columns of pairs."""

    def spec(name, x):
        dims = DIMS.get(name, "")
        wanted = "t" if dims == "bnts" else "ts"
        return P(*("seq" if d in wanted and n > 1 else None for d, n in zip(dims, x.shape)))

    return {name: spec(name, x) for name, x in arrays.items()}


def reorder(arrays: dict[str, Any], call: Call, devices: int, layout: str, back=False) -> dict:
    """Return arrays of whole sequences with their tokens in the order of a layout, or back."""
    orders = {}
    for letter, length in (("t", call.T), ("s", call.S)):
        order = memeff.sequence_positions(length, devices, layout)
        orders[letter] = np.argsort(order) if back else order

    def move(name, x):
        for dim, letter in enumerate(DIMS.get(name.removeprefix("d "), "")):
            if letter in orders and x.shape[dim] > 1:
                x = np.take(x, orders[letter], axis=dim)
        return x

    return {name: move(name, x) for name, x in arrays.items()}


def cotangents(call: Call, N: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    dtype = call.arrays["query"].dtype
    return {
        "dout": rng.standard_normal((B, call.T, N, D)).astype(dtype),
        "dlse": rng.standard_normal((B, call.T, N)).astype(np.result_type(dtype, f32)),
    }


def tangents(call: Call) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    return {
        name: rng.standard_normal(x.shape).astype(x.dtype)
        for name, x in sorted(call.arrays.items())
        if is_float(x)
    }


def first_order(attend: Callable, arrays, dresults, directions) -> dict[str, Any]:
    """Return out, lse, the gradient of each float, and the tangents of out and lse, by name."""
    floats = {name: x for name, x in arrays.items() if is_float(x)}
    rest = {name: x for name, x in arrays.items() if name not in floats}

    def f(floats):
        return attend(**floats, **rest)

    (out, lse), pull = jax.vjp(f, floats)
    (gradients,) = pull((dresults["dout"], dresults["dlse"]))
    _, (tout, tlse) = jax.jvp(f, (floats,), (directions,))
    named = {f"d {name}": x for name, x in gradients.items()}
    return {"out": out, "lse": lse, **named, "tangent of out": tout, "tangent of lse": tlse}


def second_order(attend: Callable, arrays, dresults, directions) -> dict[str, Any]:
    """Return the tangents of the gradients of all floats, by name."""

    def gradients(floats):
        rest = {name: x for name, x in arrays.items() if name not in floats}

        def f(floats):
            return attend(**floats, **rest)

        _, pull = jax.vjp(f, floats)
        return pull((dresults["dout"], dresults["dlse"]))[0]

    floats = {name: x for name, x in arrays.items() if is_float(x)}
    _, found = jax.jvp(gradients, (floats,), (directions,))
    return {f"d {name}": x for name, x in found.items()}


RESULT_DIMS = {
    "out": "btnd",
    "lse": "btn",
    "tangent of out": "btnd",
    "tangent of lse": "btn",
    "dout": "btnd",
    "dlse": "btn",
}


def results(
    call: Call,
    devices: int = 1,
    layout: str = "contiguous",
    strategy: str | None = None,
    of: Callable = first_order,
    inside: bool = True,
    **how,
) -> dict[str, np.ndarray]:
    """Return results by name, with tokens in their own order; `devices` of 1: without a mesh.

    `inside`: the call is inside shard_map; otherwise it enters shard_map itself.
    """
    N = call.arrays["query"].shape[2]
    arguments = call.arrays, cotangents(call, N), tangents(call)
    static = dict(call.static, return_residual=True, chunk_size=(5, 4)) | how
    if devices == 1:
        attend = functools.partial(dot_product_attention, **static)
        run = jax.jit(functools.partial(of, attend))
        return jax.tree.map(np.asarray, run(*arguments))
    static |= dict(sequence_axis="seq", sequence_layout=layout, context_parallel=strategy)
    attend = functools.partial(dot_product_attention, **static)
    dims_of = DIMS | RESULT_DIMS

    def ordered(arrays, back=False):
        orders = {}
        for letter, length in (("t", call.T), ("s", call.S)):
            order = memeff.sequence_positions(length, devices, layout)
            orders[letter] = np.argsort(order) if back else order
        moved = {}
        for name, x in arrays.items():
            for dim, letter in enumerate(dims_of.get(name.removeprefix("d "), "")):
                if letter in orders and x.shape[dim] > 1:
                    x = np.take(x, orders[letter], axis=dim)
            moved[name] = x
        return moved

    def spec_of(arrays):
        found = {}
        for name, x in arrays.items():
            dims = dims_of.get(name.removeprefix("d "), "")
            wanted = "t" if dims == "bnts" else "ts"
            entries = ["seq" if d in wanted and n > 1 else None for d, n in zip(dims, x.shape)]
            found[name] = P(*entries)
        return found

    arguments = tuple(map(ordered, arguments))
    run = functools.partial(of, attend)
    mesh = mesh_of(devices)
    if inside:
        one = functools.partial(dot_product_attention, **call.static, return_residual=True)
        shapes = jax.eval_shape(functools.partial(of, one), *arguments)
        run = jax.shard_map(
            run, mesh=mesh, in_specs=tuple(map(spec_of, arguments)), out_specs=spec_of(shapes)
        )
        found = jax.jit(run)(*arguments)
    else:
        with jax.set_mesh(mesh):
            found = jax.jit(run)(*arguments)
    return ordered(jax.tree.map(np.asarray, found), back=True)


def errors(found: dict, expected: dict, devices: int) -> dict[str, float]:
    """Return for each result the largest error on any device over the largest number."""
    assert found.keys() == expected.keys()
    result = {}
    for name, x in expected.items():
        size = max(1e-30, float(np.abs(np.where(np.isfinite(x), x, 0)).max()))
        assert np.array_equal(np.isfinite(x), np.isfinite(found[name])), name
        difference = np.where(np.isfinite(x), found[name] - np.where(np.isfinite(x), x, 0), 0)
        result[name] = float(np.abs(difference).max()) / size
    return result
