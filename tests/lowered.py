"""Write the StableHLO of every named call, without the names of functions and files, and digests.

    python tests/lowered.py before
    git switch new
    python tests/lowered.py after
    diff -r before after

A change that leaves every file as it was has not changed what XLA compiles, and so changes neither
bits nor speed nor memory. tests/lowered_kernels.py does the same for the Hopper kernels.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from cases import CASES, SINGLES, Sizes, split  # noqa: E402
from conftest import GRADIENTS  # noqa: E402
from without_names import write_without_names  # noqa: E402

import memeff  # noqa: E402
from memeff import masks, scores, tile_sizes, transforms  # noqa: E402
from memeff.device import pretend_device  # noqa: E402

LARGE = Sizes(B=1, T=2500, S=3000, K=2, G=2, H=64, D=64)


def larger_calls() -> dict[str, tuple[tuple, dict[str, Any]]]:
    """Return calls of several tiles of the default size: {name: (args, kwargs)}."""
    z = LARGE
    rng = np.random.default_rng(0)
    ids = np.arange(z.S) // 700
    documents = masks.documents(ids[: z.T], ids)
    blocks = memeff.block_mask(documents & masks.causal(), z.T, z.S)
    slopes = np.linspace(0.1, 1, z.N, dtype=np.float32)
    args = (
        np.zeros((z.B, z.T, z.N, z.H), np.float32),
        np.zeros((z.B, z.S, z.K, z.H), np.float32),
        np.zeros((z.B, z.S, z.K, z.D), np.float32),
    )
    features = {
        "plain": {},
        "causal": dict(is_causal=True),
        "window": dict(local_window_size=(300, 20)),
        "offset": dict(is_causal=True, q_offset=500),
        "soft cap": dict(logits_soft_cap=20.0, is_causal=True),
        "lengths": dict(key_value_seq_lengths=np.array([2000], np.int32)),
        "bias": dict(bias=rng.standard_normal((z.N, 1, z.S), np.float32)),
        "sinks": dict(sinks=rng.standard_normal(z.N, np.float32)),
        "dropout": dict(dropout_rate=0.1, dropout_rng=np.array([1, 2], np.uint32)),
        "alibi": dict(score_fn=scores.alibi(slopes), is_causal=True),
        "documents": dict(mask_fn=documents),
        "block mask": dict(mask_fn=blocks),
        "rotary": dict(qk_transform=transforms.rotary()),
        "lse": dict(return_residual=True),
        "reference": dict(implementation="reference", is_causal=True),
        "chunks": dict(chunk_size=(128, 256), is_causal=True),
        "limit": dict(memory_limit="24MiB"),
    }
    return {name: (args, kwargs) for name, kwargs in features.items()}


def derivatives(kwargs: dict[str, Any]) -> dict[str, Callable]:
    """Return functions of (args, floats, rest): the call, its derivatives and its vmap."""
    static, _ = split(kwargs)

    def call(args, floats, rest):
        return memeff.dot_product_attention(*args, **floats, **rest, **static)

    def vjp(args, floats, rest):
        out, pull = jax.vjp(functools.partial(call, rest=rest), args, floats)
        return out, pull(out)

    def tangent(function, args, floats, rest):
        primals = (args, floats)
        return jax.jvp(functools.partial(function, rest=rest), primals, primals)

    def mapped(args, floats, rest):
        query, key, value = args

        def differentiated(query):
            return vjp((query, key, value), floats, rest)

        return jax.vmap(differentiated)(jnp.stack([query] * 3))

    return {
        "forward": call,
        "vjp": vjp,
        "jvp": functools.partial(tangent, call),
        "second": functools.partial(tangent, vjp),
        "vmap": mapped,
    }


def programs() -> Iterator[tuple[str, str]]:
    """Yield the name and text of each program."""
    for platform in ("cpu", "gpu"):
        for name, case in CASES.items():
            dtypes = ("float32", "bfloat16") if name in SINGLES else ("float32",)
            for dtype in dtypes:
                args, kwargs = case.inputs(jnp.dtype(dtype))
                yield from lowered(f"{platform} {dtype} {name}", platform, args, kwargs)
        for name, (args, kwargs) in larger_calls().items():
            for dtype in ("float32", "bfloat16", "float16"):
                cast = tuple(x.astype(jnp.dtype(dtype)) for x in args)
                yield from lowered(f"{platform} {dtype} large {name}", platform, cast, kwargs)


def lowered(
    name: str, platform: str, args: tuple, kwargs: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each derivative of one call, as it is lowered for `platform`."""
    _, arrays = split(kwargs)
    floats = {name: x for name, x in arrays.items() if name in GRADIENTS}
    rest = {name: x for name, x in arrays.items() if name not in GRADIENTS}
    for derivative, function in derivatives(kwargs).items():
        device = pretend_device("gpu") if platform == "gpu" else contextlib.nullcontext()
        with device:
            program = jax.jit(function).lower(args, floats, rest)
            yield f"{name} {derivative}", program.as_text()


def main(folder: Path) -> None:
    """Write a text for each program, and all digests to digests.txt."""
    warnings.simplefilter("ignore")
    tile_sizes.may_be_sharded = lambda: False  # as where JAX has one device
    write_without_names(folder, programs())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
