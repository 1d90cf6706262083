"""Compile the kernels for an H200, without a GPU, and print what ptxas says of each.

test_sm90a.py runs this file, with its environment set before JAX starts.
"""

import sys

from described_h200 import mesh_of, set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import memeff  # noqa: E402
from memeff import masks, scores
from memeff.device import pretend_device

B = 2
T = 8192
N = 16
IDS = np.arange(B * T).reshape(B, T) // 3000


DROPOUT = dict(
    dropout_rng=np.zeros(2, np.uint32),
    dropout_rate=0.1,
    dropout_bits="mix32",
    broadcast_dropout=False,
)
SINKS = np.linspace(-1, 1, N, dtype=np.float32)


def t5(slopes):
    """Return T5's score with a table that nobody differentiates."""
    return scores.t5(jnp.linspace(-1, 1, 32)[:, None] * jax.lax.stop_gradient(slopes))


CASES = {
    "full": dict(H=128),
    "causal": dict(H=64, is_causal=True),
    "grouped": dict(H=128, K=4, is_causal=True),
    "one key head": dict(H=128, K=1, is_causal=True),
    "one key head, fused": dict(H=64, K=1, is_causal=True, backward="fused"),
    "window": dict(H=128, local_window_size=(1000, 0), logits_soft_cap=20.0),
    "wide": dict(H=256, is_causal=True),
    "values of 128": dict(H=192, D=128, is_causal=True),
    "wide, documents, alibi": dict(
        H=256, mask_fn=masks.documents(IDS) & masks.causal(), score=scores.alibi
    ),
    "wide, segments, soft cap": dict(
        H=256, logits_soft_cap=50.0, query_segment_ids=IDS, key_value_segment_ids=IDS
    ),
    "fused": dict(H=128, is_causal=True, backward="fused"),
    "fused 64": dict(H=64, backward="fused"),
    "float16": dict(H=128, is_causal=True, T=8200, dtype="float16"),
    "float16 64": dict(H=64, T=8200, dtype="float16"),
    "float32": dict(H=128, is_causal=True, T=4096, dtype="float32"),
    "float32 64": dict(H=64, is_causal=True, T=4096, dtype="float32"),
    "float32 64, full": dict(H=64, T=4096, dtype="float32"),
    "tails": dict(H=128, is_causal=True, T=8200),
    "tails 64": dict(H=64, is_causal=True, T=8200),
    "tails, fused": dict(H=128, is_causal=True, T=8200, backward="fused"),
    "sinks": dict(H=128, is_causal=True, sinks=SINKS),
    "sinks 64": dict(H=64, sinks=SINKS),
    "jvp, sinks": dict(H=128, is_causal=True, sinks=SINKS, jvp=True),
    "alibi": dict(H=128, is_causal=True, score=scores.alibi),
    "alibi 64": dict(H=64, is_causal=True, score=scores.alibi),
    "t5": dict(H=128, is_causal=True, score=t5),
    "t5 64": dict(H=64, score=t5),
    "t5, all keys": dict(H=128, score=t5),
    "score soft cap": dict(H=128, is_causal=True, score=scores.soft_cap),
    "documents": dict(H=128, mask_fn=masks.documents(IDS)),
    "block mask": dict(
        H=128, mask_fn=memeff.block_mask(masks.documents(IDS[0]) & masks.causal(), T)
    ),
    "documents, alibi": dict(
        H=64, mask_fn=masks.documents(IDS) & masks.causal(), score=scores.alibi
    ),
    "bias": dict(H=128, T=2048, bias=((1, N, 2048, 2048), "bfloat16")),
    "bias 64": dict(H=64, T=2048, bias=((1, N, 2048, 2048), "bfloat16")),
    "bias 64, float32": dict(H=64, T=2048, bias=((B, 1, 2048, 2048), "float32")),
    "bias 32": dict(H=32, T=2000, is_causal=True, bias=((1, N, 2000, 2000), "bfloat16")),
    "scale 64": dict(H=64, scale=np.array(0.1, np.float32)),
    "scale": dict(H=128, is_causal=True, scale=np.array(0.1, np.float32)),
    "scale, soft cap": dict(H=128, is_causal=True, scale=SINKS[-1:], logits_soft_cap=SINKS[-1:]),
    "dropout 64": dict(H=64, **DROPOUT),
    "dropout": dict(H=128, is_causal=True, **DROPOUT),
    "dropout, bias 64": dict(H=64, T=2048, bias=((1, N, 2048, 2048), "bfloat16"), **DROPOUT),
    "bias of keys": dict(H=64, bias=((B, 1, 1, T), "float32")),
    "jvp": dict(H=128, is_causal=True, jvp=True),
    "jvp 64": dict(H=64, jvp=True),
    "jvp, soft cap": dict(H=128, is_causal=True, logits_soft_cap=20.0, jvp=True),
    "jvp, alibi": dict(H=128, is_causal=True, score=scores.alibi, jvp=True),
    "jvp 64, alibi": dict(H=64, is_causal=True, score=scores.alibi, jvp=True),
}
# Calls of T queries at the end of a cache of S keys.
DECODE_CASES = {
    "decode": dict(H=128, K=4),
    "decode 64": dict(H=64, K=4),
    "decode, one head": dict(H=128, K=1),
    "decode, drafts": dict(H=128, K=4, T=8),
    "decode, drafts 64": dict(H=64, K=4, T=8),
    "decode, rows of two tiles": dict(H=128, K=2, T=16),
    "decode, window": dict(H=128, K=4, T=4, local_window_size=(4095, 0), sinks=SINKS),
    "decode, soft cap": dict(H=128, K=4, logits_soft_cap=20.0),
    "decode, float16": dict(H=64, K=4, dtype="float16"),
    "decode, alibi": dict(H=128, K=4, T=4, score_fn=scores.alibi(SINKS)),
    "decode, documents": dict(H=64, K=4, T=4, mask_fn=masks.documents(IDS[:, :4], IDS)),
    "decode, pages of 64": dict(H=128, K=4, page=64),
    "decode, pages of 16": dict(H=64, K=4, T=8, page=16),
    "decode, int8": dict(H=128, K=4, stored="int8"),
    "decode, int8 64": dict(H=64, K=4, T=8, stored="int8"),
    "decode, float8": dict(H=128, K=4, stored="float8_e4m3fn"),
    "decode, int8, two tiles of rows": dict(H=128, K=2, T=16, stored="int8"),
    "decode, float8, drafts": dict(H=128, K=4, T=16, stored="float8_e4m3fn"),
    "decode, int8 in pages": dict(H=128, K=4, T=4, stored="int8", page=64),
    "decode, short, drafts": dict(H=128, K=4, T=8, S=2048, sinks=SINKS),  # four rows merged at once
    "decode, short, drafts 64": dict(H=64, K=4, T=8, S=2048),
    "decode, short, pages": dict(H=64, K=4, T=8, S=2048, page=16),
    "decode, short, int8": dict(H=128, K=4, S=2048, stored="int8"),
}


def lowered_decode(**case):
    """Return the lowered forward of T queries at the end of a cache of S keys."""
    in_cache = "page" in case or "stored" in case
    return (_lowered_decode_of_cache if in_cache else _lowered_decode_of_arrays)(**case)


def _lowered_decode_of_cache(
    H: int, K: int, T: int = 1, S: int = 32768, page: int | None = None, stored: str = "bfloat16"
):
    """Return the lowered forward of a cache, in pages or in 8 bits."""
    mesh = mesh_of(1, "x")
    on_device = NamedSharding(mesh, PartitionSpec())

    def zeros():
        if page is None:
            return memeff.KVCache.zeros(B, S, K, H, stored)
        pages = dict(batch=B, pages_per_sequence=S // page)
        return memeff.PagedKVCache.zeros(B * S // page, page, K, H, stored, **pages)

    query = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    with jax.set_mesh(mesh), pretend_device("gpu", "9.0"):
        jitted = jax.jit(
            lambda query, cache: cache.attend(query, implementation="pallas"),
            in_shardings=on_device,
            out_shardings=on_device,
        )
        return jitted.trace(query, jax.eval_shape(zeros)).lower()


def _lowered_decode_of_arrays(
    H: int, K: int, T: int = 1, S: int = 32768, dtype: str = "bfloat16", **options
):
    """Return the lowered forward of a cache that is arrays."""
    mesh = mesh_of(1, "x")
    on_device = NamedSharding(mesh, PartitionSpec())
    if "mask_fn" in options:
        S = IDS.shape[1]

    def attend(query, key, value, lengths):
        offset = {} if "mask_fn" in options else dict(is_causal=True, q_offset=lengths - T)
        return memeff.dot_product_attention(
            query, key, value, key_value_seq_lengths=lengths, **offset, **options
        )

    shapes = [jax.ShapeDtypeStruct((B, T, N, H), dtype)]
    shapes += [jax.ShapeDtypeStruct((B, S, K, H), dtype)] * 2
    shapes.append(jax.ShapeDtypeStruct((B,), jnp.int32))
    with jax.set_mesh(mesh), pretend_device("gpu", "9.0"):
        jitted = jax.jit(attend, in_shardings=on_device, out_shardings=on_device)
        return jitted.trace(*shapes).lower()


# Passes of the loss of a large vocabulary: their settings, and what they compute.
LOSSES = {
    "loss": {},
    "loss, mean": dict(reduction="mean"),
    "loss, smoothing": dict(label_smoothing=0.1),
    "loss, soft cap": dict(logits_soft_cap=30.0),
    "loss, mean, tail": dict(reduction="mean", words=131_072 - 64),
}


def lowered_loss(words: int = 131_072, **options):
    """Return the lowered loss of 8,192 tokens and its gradient."""
    mesh = mesh_of(1, "x")
    on_device = NamedSharding(mesh, PartitionSpec())

    def loss(x, kernel, labels):
        losses = memeff.linear_cross_entropy(x, kernel, labels, **options)
        return losses.mean()

    shapes = [
        jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((4096, words), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192,), jnp.int32),
    ]
    with jax.set_mesh(mesh), pretend_device("gpu", "9.0"):
        gradient = jax.value_and_grad(loss, (0, 1))
        jitted = jax.jit(gradient, in_shardings=on_device, out_shardings=on_device)
        return jitted.trace(*shapes).lower()


def lowered(
    H: int,
    K: int = N,
    T: int = T,
    score=None,
    jvp: bool = False,
    dtype: str = "bfloat16",
    bias: tuple[tuple[int, ...], str] | None = None,
    D: int | None = None,
    **options,
):
    """Return the lowered forward and gradient of a call, or its tangent with `jvp`.

    The gradient is by the params of `score` or by the `bias` (shape, dtype), too. The tangent is
    along query, key and value.
    """
    mesh = mesh_of(1, "x")
    on_device = NamedSharding(mesh, PartitionSpec())

    def attend(query, key, value, *of_heads):
        scored = {}
        if score is not None:
            scored["score_fn"] = score(*of_heads)
        elif bias is not None:
            scored["bias"] = of_heads[0]
        return memeff.dot_product_attention(
            query, key, value, implementation="pallas", **scored, **options
        )

    def both(dout, *args):
        out, pull = jax.vjp(attend, *args)
        return out, *pull(dout)

    def along(dq, query, key, value, dk, dv, *of_heads):
        return jax.jvp(lambda *args: attend(*args, *of_heads), (query, key, value), (dq, dk, dv))

    heads = [N, N, K, K]
    if jvp:
        heads += [K, K]
    dims = [D or H, H, H, D or H, H, D or H]  # dout, query, key, value; tangents of key and value
    shapes = [jax.ShapeDtypeStruct((B, T, *x), dtype) for x in zip(heads, dims, strict=False)]
    if score is not None:
        shapes.append(jax.ShapeDtypeStruct((N,), jnp.float32))
    elif bias is not None:
        shapes.append(jax.ShapeDtypeStruct(*bias))
    with jax.set_mesh(mesh), pretend_device("gpu", "9.0"):
        function = along if jvp else both
        jitted = jax.jit(function, in_shardings=on_device, out_shardings=on_device)
        return jitted.trace(*shapes).lower()


def main(names: list[str]) -> None:
    """Compile the named cases, or all."""
    for name in names or (*CASES, *LOSSES, *DECODE_CASES):
        print("case", name, flush=True)
        if name in LOSSES:
            program = lowered_loss(**LOSSES[name])
        elif name in DECODE_CASES:
            program = lowered_decode(**DECODE_CASES[name])
        else:
            program = lowered(**CASES[name])
        memory = program.compile().memory_analysis()
        print("temporary bytes", memory.temp_size_in_bytes, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
