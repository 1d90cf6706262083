"""Let hypothesis draw calls of every feature, as shapes alone.

They serve questions to the compiler, and are never run.

@given(drawn.calls())
def test(call):
    drawn.programs(call, limit)  # a forward and gradients, and the shapes that each takes
"""

import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import Sizes
from hypothesis import strategies as st

import memeff
from memeff import masks, scores, transforms

LENGTHS = 1, 2, 37, 64, 97, 128, 257, 300, 513, 1000, 1025, 1500, 2048, 4099
DTYPES = "float32", "bfloat16", "float16", "float64"
NO_GRADIENT = "mask_fn", "mask_params", "dropout_rng"


class Call(NamedTuple):
    """Arguments of `dot_product_attention` by name.

    Arrays are `jax.ShapeDtypeStruct`, except where their numbers must be known.
    """

    arguments: dict[str, Any]

    @property
    def x64(self) -> bool:
        return self.arguments["query"].dtype == np.float64

    def __repr__(self) -> str:
        words = [f"{name}={_short(x)}" for name, x in self.arguments.items()]
        return f"Call({', '.join(words)})"


def _short(x: Any) -> str:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return str(x)
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: array(x.shape, x.dtype), tree)


# ---- drawing a call


class Choices(NamedTuple):
    """Random choices from one generator."""

    rng: random.Random

    def sometimes(self, chance: int = 3) -> bool:
        """Return True one time in `chance` + 1."""
        return self.rng.randrange(chance + 1) == 0

    def one_of(self, *options: Any) -> Any:
        return self.rng.choice(options)


def calls() -> st.SearchStrategy[Call]:
    """Draw calls from a generator that hypothesis seeds.

    If hypothesis drew the features itself, it would draw nearly the same call again and again.
    """
    return st.randoms(use_true_random=True).map(call_of)


def call_of(rng: random.Random) -> Call:
    """Return one call. Most optional arguments are present one time in four."""
    choices = Choices(rng)
    z = _sizes(choices)
    dtype = choices.one_of(*DTYPES)
    wide = np.float64 if dtype == "float64" else np.float32
    arguments: dict[str, Any] = dict(
        query=array((*z.batch, z.T, z.N, z.H), dtype),
        key=array((*z.batch, z.S, z.K, z.H), dtype),
        value=array((*z.batch, z.S, z.K, z.D), dtype),
    )
    arguments |= _pair_arrays(choices, z, dtype, wide)
    arguments |= _positions(choices, z)
    arguments |= _logit_arguments(choices, z, dtype, wide)
    arguments |= _score(choices, z, dtype, wide)
    arguments |= _mask_function(choices, z, has_offset="q_offset" in arguments)
    arguments |= _transform(choices, z, dtype, wide)
    arguments |= _options(choices, z)
    return Call(arguments)


def _sizes(choices: Choices) -> Sizes:
    leads = choices.one_of((1,), (1,), (2,), (), (3,), (2, 3))
    K = choices.one_of(1, 2, 3, 4)
    G = choices.one_of(1, 1, 2, 4)
    T = choices.one_of(*LENGTHS)
    S = T if choices.sometimes(1) else choices.one_of(*LENGTHS)
    H = choices.one_of(1, 8, 16, 40, 64, 128)
    D = H if choices.sometimes(1) else choices.one_of(1, 8, 24, 64, 128)
    return Sizes(int(np.prod(leads)), T, S, K, G, H, D, leads)


def _pair_arrays(choices: Choices, z: Sizes, dtype: str, wide: Any) -> dict[str, Any]:
    """Return `bias` and `mask`, each of a shape that broadcasts to [*B, N, T, S]."""

    def broadcast(dtype):
        full = [*z.batch, z.N, z.T, z.S]
        shape = [size if choices.sometimes(1) else 1 for size in full]
        while len(shape) > 1 and shape[0] == 1 and choices.sometimes(1):
            shape = shape[1:]
        return array(shape, dtype)

    arguments = {}
    if choices.sometimes():
        arguments["bias"] = broadcast(choices.one_of(dtype, wide))
    if choices.sometimes():
        arguments["mask"] = broadcast(np.bool_)
    return arguments


def _positions(choices: Choices, z: Sizes) -> dict[str, Any]:
    """Return the arguments that say by position who may attend to whom."""
    windows = (300, 100), (None, 5), (7, None), (0, 0), (1000, 1000)
    arguments = {}
    if choices.sometimes():
        arguments["is_causal"] = True
    if choices.sometimes():
        arguments["local_window_size"] = choices.one_of(*windows)
    if choices.sometimes():
        arguments["query_seq_lengths"] = array(z.batch, np.int32)
    if choices.sometimes():
        arguments["key_value_seq_lengths"] = array(z.batch, choices.one_of(np.int32, np.uint8))
    if choices.sometimes():
        arguments["q_offset"] = choices.one_of(17, -5, array(z.batch, np.int32))
    if choices.sometimes():
        ids = choices.one_of(np.int32, np.uint8)
        arguments["query_segment_ids"] = array((*z.batch, z.T), ids)
        arguments["key_value_segment_ids"] = array((*z.batch, z.S), ids)
    return arguments


def _logit_arguments(choices: Choices, z: Sizes, dtype: str, wide: Any) -> dict[str, Any]:
    """Return scale, soft cap, sinks and dropout."""
    arguments = {}
    if choices.sometimes():
        arguments["scale"] = choices.one_of(0.3, array((), wide))
    if choices.sometimes():
        arguments["logits_soft_cap"] = choices.one_of(20.0, array((), wide))
    if choices.sometimes():
        arguments["sinks"] = array((z.N,), choices.one_of(dtype, wide))
    if choices.sometimes():
        arguments["dropout_rate"] = 0.1
        arguments["dropout_rng"] = array((2,), np.uint32)
        arguments["broadcast_dropout"] = choices.sometimes(1)
    return arguments


def _score(choices: Choices, z: Sizes, dtype: str, wide: Any) -> dict[str, Any]:
    if not choices.sometimes(1):
        return {}
    slopes = np.ones(z.N, np.float32)
    table = np.ones((32, z.N), np.float32)
    ready_made = (
        scores.alibi(slopes),
        scores.t5(table),
        scores.relative(np.ones((z.N, 41), np.float32)),
        scores.soft_cap(np.float32(9)),
        scores.head_temperature(slopes),
        scores.alibi(slopes).then(scores.t5(table)),
    )
    score = choices.one_of(*ready_made, None)
    if score is not None:
        return {"score_fn": abstract(score)}
    short = choices.one_of(dtype, wide)
    params = (array((z.B, z.N), wide), array((z.T,), short), array((z.S,), short), array((), wide))
    return {"score_fn": _alibi_with_tables, "score_params": params}


def _alibi_with_tables(score, batch, head, q_pos, k_pos, params):
    """Use what no ready-made score does.

    That is params read by batch entry and at both positions, and a product of logits.
    """
    batch_table, query_table, key_table, scale = params
    query_part = query_table[q_pos].astype(score.dtype)
    key_part = key_table[k_pos].astype(score.dtype)
    return score * scale + batch_table[batch, head] + query_part * key_part


def _mask_function(choices: Choices, z: Sizes, has_offset: bool) -> dict[str, Any]:
    """Return a ready-made mask, a block mask, or a function. A block mask takes no `q_offset`."""
    if not choices.sometimes():
        return {}
    ids = np.arange(max(z.T, z.S)) // 100
    documents = masks.documents(ids[: z.T], ids[: z.S])
    prefix = masks.prefix(np.int32(50)) | masks.causal()
    mask = choices.one_of(documents, prefix, masks.dilated(3), "block mask", "function")
    if isinstance(mask, memeff.Mask):
        return {"mask_fn": abstract(mask)}
    if mask == "block mask" and not has_offset:
        return {"mask_fn": memeff.block_mask(documents, z.T, z.S)}
    return {"mask_fn": _near, "mask_params": array((z.N,), np.int32)}


def _near(batch, head, q_pos, k_pos, reach):
    return abs(q_pos - k_pos) <= reach[head]


def _transform(choices: Choices, z: Sizes, dtype: str, wide: Any) -> dict[str, Any]:
    if not choices.sometimes():
        return {}
    scale = np.ones(z.H, np.float32)
    options = [transforms.rms_norm(scale, scale)]
    if z.H % 2 == 0:
        options.append(transforms.rotary())
    transform = choices.one_of(*options, None)
    if transform is not None:
        return {"qk_transform": abstract(transform)}
    params = array((z.H, z.H), choices.one_of(dtype, wide))
    return {"qk_transform": _projected, "qk_transform_params": params}


def _projected(x, position, which, params):
    return (x.astype(jnp.float32) @ params.astype(jnp.float32)).astype(x.dtype)


def _options(choices: Choices, z: Sizes) -> dict[str, Any]:
    """Return the arguments that change no number, and `return_residual`."""
    arguments = {}
    if choices.sometimes():
        arguments["return_residual"] = True
    if choices.sometimes(7):
        arguments["chunk_size"] = choices.one_of(64, (96, 160), (33, 257), 1024)
    if choices.sometimes(7):
        arguments["precision"] = "highest"
    if choices.sometimes(15) and z.B * z.N * z.T * z.S < 2**27:
        arguments["implementation"] = "reference"
    return arguments


# ---- compiling it


def split(call: Call) -> tuple[Any, Any, Any]:
    """Split a call into floats that get a gradient, other arrays, and a function that joins both.

    The function returns the call's arguments.
    """
    leaves, tree = jax.tree.flatten_with_path(call.arguments)
    parts = {"floats": [], "rest": [], "static": []}
    kinds = []
    for path, x in leaves:
        kind = _kind(path[0].key, x)
        kinds.append(kind)
        parts[kind].append(x)

    def join(floats, rest):
        values = {"floats": iter(floats), "rest": iter(rest), "static": iter(parts["static"])}
        return jax.tree.unflatten(tree, [next(values[kind]) for kind in kinds])

    return parts["floats"], parts["rest"], join


def _kind(name: str, x: Any) -> str:
    if not isinstance(x, jax.ShapeDtypeStruct):
        return "static"
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return "floats" if is_float and name not in NO_GRADIENT else "rest"


def programs(call: Call, limit: int | None = None) -> dict[str, tuple[Any, tuple]]:
    """Return the forward, and the gradient by all floats with and without the forward's results.

    Each is a function and the shapes of its arguments. The gradients take cotangents.
    """
    floats, rest, join = split(call)

    def forward(floats, rest):
        return memeff.dot_product_attention(**join(floats, rest), memory_limit=limit)

    def both(floats, rest, cotangents):
        results, pull = jax.vjp(lambda floats: forward(floats, rest), floats)
        return results, pull(cotangents)

    def gradient(floats, rest, cotangents):
        return both(floats, rest, cotangents)[1]

    def without_limit(floats, rest):
        return memeff.dot_product_attention(**join(floats, rest))

    cotangents = abstract(jax.eval_shape(without_limit, floats, rest))
    return {
        "forward": (forward, (floats, rest)),
        "both": (both, (floats, rest, cotangents)),
        "gradient": (gradient, (floats, rest, cotangents)),
    }
