"""Calls of every feature, drawn by hypothesis, as shapes alone: for what is asked of the compiler and never run.

@given(drawn.calls())
def test(call):
    drawn.programs(call, limit)     # a forward and gradients, and the shapes that each takes
"""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import memeff
from memeff import masks, scores, transforms

LENGTHS = 1, 2, 37, 64, 97, 128, 257, 300, 513, 1000, 1025, 1500, 2048, 4099
DTYPES = "float32", "bfloat16", "float16", "float64"
NO_GRADIENT = "mask_fn", "mask_params", "dropout_rng"


class Call(NamedTuple):
    """Arguments of `dot_product_attention` by name; arrays as `jax.ShapeDtypeStruct`, but where they must be known."""

    arguments: dict[str, Any]

    @property
    def x64(self) -> bool:
        return self.arguments["query"].dtype == np.float64

    def __repr__(self) -> str:
        return f"Call({', '.join(f'{name}={_short(x)}' for name, x in self.arguments.items())})"


def _short(x: Any) -> str:
    return (
        f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
        if isinstance(x, jax.ShapeDtypeStruct)
        else str(x)
    )


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: array(x.shape, x.dtype), tree)


def _alibi_with_tables(score, batch, head, q_pos, k_pos, params):
    """What no ready-made score does: params read by batch entry, at both positions, and a product of logits."""
    of_batch, of_query, of_key, scale = params
    return (
        score * scale
        + of_batch[batch, head]
        + of_query[q_pos].astype(score.dtype) * of_key[k_pos].astype(score.dtype)
    )


def _far(batch, head, q_pos, k_pos, reach):
    return abs(q_pos - k_pos) <= reach[head]


def _projected(x, position, which, params):
    return (x.astype(jnp.float32) @ params.astype(jnp.float32)).astype(x.dtype)


def calls() -> st.SearchStrategy[Call]:
    """Of a generator that hypothesis seeds: left alone, it likes to draw nearly the same again."""
    return st.randoms(use_true_random=True).map(call_of)


def call_of(rng: random.Random) -> Call:
    """One call; half of its features are there one time in four."""
    sometimes = lambda chance=3: rng.randrange(chance + 1) == 0
    one_of = lambda *options: rng.choice(options)
    leads, K, G = one_of((1,), (1,), (2,), (), (3,), (2, 3)), one_of(1, 2, 3, 4), one_of(1, 1, 2, 4)
    T = one_of(*LENGTHS)
    S = T if sometimes(1) else one_of(*LENGTHS)
    H = one_of(1, 8, 16, 40, 64, 128)
    D = H if sometimes(1) else one_of(1, 8, 24, 64, 128)
    dtype, B, N = one_of(*DTYPES), int(np.prod(leads)), K * G
    wide = np.float64 if dtype == "float64" else np.float32
    how: dict[str, Any] = dict(
        query=array((*leads, T, N, H), dtype),
        key=array((*leads, S, K, H), dtype),
        value=array((*leads, S, K, D), dtype),
    )

    def broadcast(dtype):
        full = [*leads, N, T, S]
        shape = [size if sometimes(1) else 1 for size in full]
        while len(shape) > 1 and shape[0] == 1 and sometimes(1):
            shape = shape[1:]
        return array(shape, dtype)

    if sometimes():
        how["bias"] = broadcast(one_of(dtype, wide))
    if sometimes():
        how["mask"] = broadcast(np.bool_)
    if sometimes():
        how["is_causal"] = True
    if sometimes():
        how["local_window_size"] = one_of((300, 100), (None, 5), (7, None), (0, 0), (1000, 1000))
    if sometimes():
        how["query_seq_lengths"] = array(leads, np.int32)
    if sometimes():
        how["key_value_seq_lengths"] = array(leads, one_of(np.int32, np.uint8))
    if sometimes():
        how["q_offset"] = one_of(17, -5, array(leads, np.int32))
    if sometimes():
        ids = one_of(np.int32, np.uint8)
        how |= dict(
            query_segment_ids=array((*leads, T), ids), key_value_segment_ids=array((*leads, S), ids)
        )
    if sometimes():
        how["scale"] = one_of(0.3, array((), wide))
    if sometimes():
        how["logits_soft_cap"] = one_of(20.0, array((), wide))
    if sometimes():
        how["sinks"] = array((N,), one_of(dtype, wide))
    if sometimes():
        rates = dict(dropout_rate=0.1, dropout_rng=array((2,), np.uint32))
        how |= rates | dict(broadcast_dropout=sometimes(1))
    if sometimes(1):
        slopes, table = np.ones(N, np.float32), np.ones((32, N), np.float32)
        ready = (
            scores.alibi(slopes),
            scores.t5(table),
            scores.relative(np.ones((N, 41), np.float32)),
        )
        ready = (
            *ready,
            scores.soft_cap(np.float32(9)),
            scores.head_temperature(slopes),
            scores.alibi(slopes).then(scores.t5(table)),
        )
        score = one_of(*ready, None)
        how["score_fn"] = abstract(score) if score else _alibi_with_tables
        if score is None:
            short = one_of(dtype, wide)
            how["score_params"] = (
                array((B, N), wide),
                array((T,), short),
                array((S,), short),
                array((), wide),
            )
    if sometimes():
        ids = np.arange(max(T, S)) // 100
        ready = (
            masks.documents(ids[:T], ids[:S]),
            masks.prefix(np.int32(50)) | masks.causal(),
            masks.dilated(3),
        )
        mask = one_of(*ready, "blocks", "own")
        if isinstance(mask, memeff.Mask):
            how["mask_fn"] = abstract(mask)
        elif mask == "blocks" and "q_offset" not in how:
            how["mask_fn"] = memeff.block_mask(ready[0], T, S)
        else:
            how |= dict(mask_fn=_far, mask_params=array((N,), np.int32))
    if sometimes():
        scale = np.ones(H, np.float32)
        ready = transforms.rms_norm(scale, scale), transforms.rotary(), None
        transform = one_of(*(x for x in ready if H % 2 == 0 or x is not ready[1]))
        how["qk_transform"] = abstract(transform) if transform else _projected
        if transform is None:
            how["qk_transform_params"] = array((H, H), one_of(dtype, wide))
    if sometimes():
        how["return_residual"] = True
    if sometimes(7):
        how["chunk_size"] = one_of(64, (96, 160), (33, 257), 1024)
    if sometimes(7):
        how["precision"] = "highest"
    if sometimes(15) and B * N * T * S < 2**27:
        how["implementation"] = "reference"
    return Call(how)


def split(call: Call) -> tuple[Any, Any, Any]:
    """Floats that get a gradient, other arrays, and a function that puts arguments together of both."""
    leaves, tree = jax.tree.flatten(call.arguments)
    names = [path[0].key for path, _ in jax.tree.flatten_with_path(call.arguments)[0]]
    kinds = []
    for name, x in zip(names, leaves, strict=True):
        given = isinstance(x, jax.ShapeDtypeStruct)
        learns = given and jnp.issubdtype(x.dtype, jnp.floating) and name not in NO_GRADIENT
        kinds.append("floats" if learns else "rest" if given else "static")
    of = lambda kind: [x for x, k in zip(leaves, kinds, strict=True) if k == kind]

    def join(floats, rest):
        parts = dict(floats=iter(floats), rest=iter(rest), static=iter(of("static")))
        return jax.tree.unflatten(tree, [next(parts[kind]) for kind in kinds])

    return of("floats"), of("rest"), join


def programs(call: Call, limit: int | None = None) -> dict[str, tuple[Any, tuple]]:
    """The forward, and the gradient by all floats for given cotangents, with and without the forward's results."""
    floats, rest, join = split(call)

    def forward(floats, rest):
        return memeff.dot_product_attention(**join(floats, rest), memory_limit=limit)

    def both(floats, rest, cotangents):
        found, pull = jax.vjp(lambda floats: forward(floats, rest), floats)
        return found, pull(cotangents)

    types = jax.eval_shape(lambda *x: memeff.dot_product_attention(**join(*x)), floats, rest)
    shapes = floats, rest, abstract(types)
    return {
        "forward": (forward, shapes[:2]),
        "both": (both, shapes),
        "gradient": (lambda *x: both(*x)[1], shapes),
    }


def bytes_of(program: tuple[Any, tuple]) -> int:
    function, shapes = program
    return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
