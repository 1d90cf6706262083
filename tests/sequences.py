"""Calls of a sequence that is sharded over CPU devices, beside one device. This module has no test.

call = make_call("causal, bias", 4)  # arrays of whole sequences, in their own order
found = run_sharded(call, both_modes, 4, "zigzag", "ring")  # results by name, in that order, too
expected = run_whole(call, both_modes)
assert_near(found, expected, 4)
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
Arrays = dict[str, Any]


class Call(NamedTuple):
    """A call: sizes, what is fixed, and arrays by the name of their argument."""

    T: int
    S: int
    static: dict[str, Any]
    arrays: dict[str, np.ndarray]


# letters of the dims of whole arguments and results; others are not sharded
DIMS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnts",
    "mask": "bnts",
    "query_segment_ids": "bt",
    "key_value_segment_ids": "bs",
    "out": "btnd",
    "lse": "btn",
    "tangent of out": "btnd",
    "tangent of lse": "btn",
}


def make_call(
    kind: str,
    devices: int,
    N: int = 4,
    K: int = 2,
    dtype=f32,
    tokens: int = 6,
    head_dims: tuple[int, int] = (H, D),
) -> Call:
    """Return a call whose lengths `devices` can share, in every layout.

    Each device has `tokens` queries, an even number.
    """
    rng = np.random.default_rng(len(kind))
    H, D = head_dims
    T = S = tokens * devices
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
                S = (tokens + 4) * devices
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
    arrays |= {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, D)}
    return Call(T, S, static, arrays)


def _score(score, batch, head, q_pos, k_pos, params):
    return score + params[head, q_pos] * jnp.sin(k_pos + 1.0 * batch).astype(score.dtype)


def _mask(batch, head, q_pos, k_pos, params):
    return (params[batch, k_pos] + q_pos + head) % 4 != 0


def _transform(x, position, which, params):
    return x + params * jnp.cos(position).astype(x.dtype)


def mesh_of(devices: int, kind=AxisType.Auto) -> Mesh:
    """Return a mesh of the first CPU devices along one axis."""
    return Mesh(np.array(jax.devices()[:devices]), ("seq",), axis_types=(kind,))


def dims_of(name: str) -> str:
    """Return the letters of the dims of an argument, of its gradient, or of a result."""
    return DIMS.get(name.removeprefix("d ").partition(" by ")[0], "")


def specs_of(arrays: Arrays) -> dict[str, P]:
    """Return how arrays of whole sequences are sharded: not along the columns of pairs."""
    specs = {}
    for name, x in arrays.items():
        dims = dims_of(name)
        wanted = "t" if dims == "bnts" else "ts"
        sizes = zip(dims, x.shape, strict=False)
        specs[name] = P(*("seq" if dim in wanted and size > 1 else None for dim, size in sizes))
    return specs


def in_layout(call: Call, arrays: Arrays, devices: int, layout: str, back=False) -> Arrays:
    """Return arrays of whole sequences with their tokens in the order of a layout, or back."""
    orders = {}
    for letter, length in (("t", call.T), ("s", call.S)):
        order = memeff.sequence_positions(length, devices, layout)
        orders[letter] = np.argsort(order) if back else order
    moved = {}
    for name, x in arrays.items():
        for dim, letter in enumerate(dims_of(name)):
            if letter in orders and x.shape[dim] > 1:
                x = np.take(x, orders[letter], axis=dim)
        moved[name] = x
    return moved


def draw_directions(call: Call) -> tuple[Arrays, Arrays]:
    """Return cotangents of out and lse, and a tangent of each float."""
    rng = np.random.default_rng(7)
    query = call.arrays["query"]
    B, T, N, _ = query.shape
    D = call.arrays["value"].shape[-1]
    dout = rng.standard_normal((B, T, N, D)).astype(query.dtype)
    dlse = rng.standard_normal((B, T, N)).astype(np.result_type(query.dtype, f32))
    tangents = {}
    for name, x in sorted(call.arrays.items()):
        if is_float(x):
            tangents[name] = rng.standard_normal(x.shape).astype(x.dtype)
    return {"out": dout, "lse": dlse}, tangents


def is_float(x) -> bool:
    """Return True if x has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def of_floats(attend: Callable, arrays: Arrays) -> tuple[Callable, Arrays]:
    """Return attention as a function of its floats, by name, and these."""
    floats = {name: x for name, x in arrays.items() if is_float(x)}
    rest = {name: x for name, x in arrays.items() if name not in floats}
    return lambda floats: attend(**floats, **rest), floats


# ---- what is computed: functions (attend, arrays, cotangents, tangents) -> results by name


def forward(attend, arrays, cotangents, tangents):
    out, lse = attend(**arrays)
    return {"out": out, "lse": lse}


def gradients(attend, arrays, cotangents, tangents):
    f, floats = of_floats(attend, arrays)
    (out, lse), pull = jax.vjp(f, floats)
    (found,) = pull((cotangents["out"], cotangents["lse"]))
    return {"out": out, "lse": lse} | {f"d {name}": x for name, x in found.items()}


def both_modes(attend, arrays, cotangents, tangents):
    f, floats = of_floats(attend, arrays)
    _, (dout, dlse) = jax.jvp(f, (floats,), (tangents,))
    found = gradients(attend, arrays, cotangents, tangents)
    return found | {"tangent of out": dout, "tangent of lse": dlse}


def second_order(attend, arrays, cotangents, tangents):
    f, floats = of_floats(attend, arrays)

    def gradient(floats):
        _, pull = jax.vjp(f, floats)
        return pull((cotangents["out"], cotangents["lse"]))[0]

    _, found = jax.jvp(gradient, (floats,), (tangents,))
    return {f"d {name}": x for name, x in found.items()}


# ---- how it runs


def run_whole(call: Call, compute: Callable, options: Any = None, **how) -> Arrays:
    """Return the results of one device. `options` are XLA's, for the compiler."""
    static = call.static | how
    attend = functools.partial(dot_product_attention, **static, return_residual=True)
    run = functools.partial(compute, attend)
    # inside shard_map, because memeff knows there that one device runs it
    run = jax.shard_map(run, mesh=mesh_of(1), in_specs=P(), out_specs=P(), check_vma=False)
    found = jax.jit(run, compiler_options=options)(call.arrays, *draw_directions(call))
    return jax.tree.map(np.asarray, found)


def lower(
    call: Call,
    compute: Callable,
    devices: int,
    layout: str,
    strategy: str | None,
    inside: bool = True,
    **how,
):
    """Return the lowered program on `devices`, and its arguments in the order of the layout.

    `inside`: the call is inside shard_map; otherwise it enters shard_map itself.
    """
    sequence = dict(sequence_axis="seq", sequence_layout=layout, context_parallel=strategy)
    static = call.static | sequence | how
    attend = functools.partial(dot_product_attention, **static, return_residual=True)
    arguments = [call.arrays, *draw_directions(call)]
    arguments = tuple(in_layout(call, arrays, devices, layout) for arrays in arguments)
    run = functools.partial(compute, attend)
    mesh = mesh_of(devices)
    if not inside:
        with jax.set_mesh(mesh):
            return jax.jit(run).lower(*arguments), arguments
    whole = functools.partial(  # the reference is the fastest to trace
        dot_product_attention, **call.static, implementation="reference", return_residual=True
    )
    shapes = jax.eval_shape(functools.partial(compute, whole), *arguments)
    in_specs = tuple(map(specs_of, arguments))
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=specs_of(shapes))
    return jax.jit(run).lower(*arguments), arguments


def run_sharded(
    call: Call, compute: Callable, devices: int, layout: str, strategy, options=None, **how
):
    """Return the results of many devices, with tokens in their own order."""
    program, arguments = lower(call, compute, devices, layout, strategy, **how)
    found = program.compile(options)(*arguments)
    found = jax.tree.map(np.asarray, found)
    return in_layout(call, found, devices, layout, back=True)


def assert_near(found: Arrays, expected: Arrays, devices: int, bound=2e-6) -> None:
    """Check that on every device no result is further off than `bound` of its largest number."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        finite = np.isfinite(x)
        np.testing.assert_array_equal(found[name][~finite], x[~finite], err_msg=name)
        error = np.where(finite, np.abs(found[name] - np.where(finite, x, 0)), 0)
        dims = dims_of(name)
        largest = np.abs(np.where(finite, x, 0)).max(initial=1e-30)
        shares = [error]
        for letter in "ts":
            if letter in dims and x.shape[dims.index(letter)] > 1:
                shares = np.array_split(error, devices, axis=dims.index(letter))
        for device, share in enumerate(shares):
            off = share.max(initial=0) / largest
            assert off <= bound, f"{name} of part {device} is off by {off:.1e}"
