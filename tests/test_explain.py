"""`memeff.explain` says which implementation runs a call, in which tiles, and why no other does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_dispatch import NO_KERNELS

import memeff

f32 = np.float32


@pytest.mark.parametrize(
    "kwargs, words",
    [
        (
            dict(is_causal=True),
            ": tiles of 512 x 512 logits, 36 of 64 visited; 4 of 8 heads at a time; "
            "softmax with a precomputed",
        ),
        (
            {},
            ": tiles of 1024 x 1024 logits, 16 of 16 visited; 1 of 8 heads at a time; "
            "softmax with a precomputed bound",
        ),
        (dict(local_window_size=(512, 0)), "15 of 64 visited"),
        (dict(chunk_size=64), "4096 of 4096 visited"),
        (
            dict(logits_soft_cap=3.0),
            "16 of 16 visited; 1 of 8 heads at a time; softmax with a running maximum",
        ),
        (
            dict(key_value_seq_lengths=jax.ShapeDtypeStruct((1,), np.int32)),
            "visited between bounds that are computed at run time",
        ),
    ],
    ids=str,
)
def test_explain(kwargs, words):
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), f32)
    text = memeff.explain(x, x, x, **kwargs)
    assert text.startswith('"xla" runs this call on cpu')
    assert words in text
    assert f'"pallas": {NO_KERNELS}.' in text
    assert (
        '"reference": available with implementation="reference"; needs quadratic memory '
        "(8 x 4096 x 4096 logits)." in text
    )


def test_explain_tells_both_tiles_where_they_differ(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)
    text = memeff.explain(x, x, x)
    assert (
        "tiles of 2048 x 8192 logits, 4 of 4 visited; "
        "in the gradient tiles of 8192 x 2048 logits, 4 of 4" in text
    )
    assert "; 8 of 32 heads at a time;" in text
    text = memeff.explain(x, x, x, is_causal=True)
    assert (
        "tiles of 1024 x 1024 logits, 36 of 64 visited, "
        "merged into tiles of up to 2048 x 2048; 32 of 32 heads" in text
    )
    assert "in the gradient" not in memeff.explain(x, x, x, is_causal=True, chunk_size=512)


def test_explain_raises_as_the_call_does():
    x = jnp.ones((1, 5, 2, 3))
    with pytest.raises(ValueError, match="key"):
        memeff.explain(x, x[:, :, :, :2], x)
    with pytest.raises(TypeError, match="Omit `implementation`"):
        memeff.explain(x, x, x, implementation="xla")
    assert "runs this call" in memeff.explain(x, x, x, q_offset=np.array([3]), is_causal=True)
