"""The loss of a large vocabulary: transforms, sizes, memory, and errors."""

import functools
import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import raising
from loss_cases import (
    CHUNK,
    EVERYTHING,
    T,
    both_ways,
    case,
    draw,
    f32,
    oracle,
    ours,
    plain,
    truth_of,
)
from small_calls import assert_same

from memeff import linear_cross_entropy
from memeff.linear_cross_entropy import LossOptions
from memeff.vocabulary import loops

pytestmark = pytest.mark.once

# ---- transforms


def test_leading_dims_jit_vmap_scan_and_remat():
    """All ways to call the loss of [3, T] tokens give the numbers of one call."""
    x, kernel, labels, bias, *cotangents = (
        y.astype(f32) if y.dtype == np.float64 else y for y in draw(leads=(3, T))
    )
    static = {"label_smoothing": 0.1, "z_loss": 0.1}

    def one(x, kernel, labels, bias):
        return ours(static)(x, kernel, labels, bias=bias)

    def scanned(x, kernel, labels, bias):
        def body(_, row):
            return None, one(row[0], kernel, row[1], bias)

        return jax.lax.scan(body, None, (x, labels))[1]

    def each_token(x, kernel, labels, bias):
        return jax.vmap(jax.vmap(one, (0, None, 0, None)), (0, None, 0, None))(
            x, kernel, labels, bias
        )

    def mapped_kernels(x, kernel, labels, bias):
        kernels = jnp.stack([kernel] * 3)
        return jax.vmap(one, (0, 0, 0, None))(x, kernels, labels, bias)

    def last_axis(x, kernel, labels, bias):
        return jax.vmap(one, (2, None, 0, None), 0)(jnp.moveaxis(x, 0, 2), kernel, labels, bias)

    ways = {
        "one call": one,
        "vmap": jax.vmap(one, (0, None, 0, None)),
        "vmap of another axis": last_axis,
        "vmap of each token": each_token,
        "vmap of kernels": mapped_kernels,
        "scan": scanned,
        "remat": jax.checkpoint(one),
    }

    def gradients(way, x, kernel, labels, bias):
        def call(x, kernel, bias):
            return way(x, kernel, labels, bias)

        out, pull = jax.vjp(call, x, kernel, bias)
        return *out, *pull(tuple(cotangents))

    @jax.jit
    def run(*args):
        return {name: gradients(way, *args) for name, way in ways.items()}

    found = run(x, kernel, labels, bias)
    found["no jit"] = gradients(one, x, kernel, labels, bias)
    assert_same(found, dict.fromkeys(found, found["one call"]), 4e-6)


def test_vmap_of_labels_and_of_cotangents():
    """The same tokens with two lists of labels, and the gradient of each token's loss."""
    x, kernel, labels, _, _, _ = case("plain", "float32")
    both = np.stack([labels, labels[::-1]])

    def of_labels(labels):
        return linear_cross_entropy(x, kernel, labels, chunk_size=CHUNK)

    def of_kernel(kernel):
        return linear_cross_entropy(x[:3], kernel, labels[:3], chunk_size=(2, 11))

    def plain_of_kernel(kernel):
        return plain(x[:3], kernel, labels[:3])[0]

    @jax.jit
    def run_plain(both, kernel):
        losses = [plain(x, kernel, labels)[0] for labels in both]
        return jnp.stack(losses), jax.jacrev(plain_of_kernel)(kernel)

    @jax.jit
    def run(both, kernel):
        return jax.vmap(of_labels)(both), jax.jacrev(of_kernel)(kernel)

    losses, jacobian = run(both, kernel)
    plain_losses, plain_jacobian = run_plain(both, kernel)
    np.testing.assert_allclose(losses, plain_losses, atol=4e-6)
    np.testing.assert_allclose(jacobian, plain_jacobian, atol=4e-6)


def test_strict_promotion_and_debug_nans():
    x, kernel, labels, cotangents, arrays, static = case(EVERYTHING, "float32")
    args = jax.tree.map(jnp.asarray, (x, kernel, labels, cotangents, arrays))
    with jax.numpy_dtype_promotion("strict"), jax.debug_nans(True):
        jax.block_until_ready(jax.jit(functools.partial(both_ways, ours(static)))(*args))


def test_strict_promotion_of_second_derivatives_in_16_bits():
    x, kernel, labels, _, _, _ = case("plain", "bfloat16")
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    bias = jnp.zeros(kernel.shape[1], x.dtype)

    def loss(*inputs):
        x, kernel, bias = inputs
        return linear_cross_entropy(x, kernel, labels, bias=bias, label_smoothing=0.1).sum()

    def tangents(*inputs):
        return jax.jvp(jax.grad(loss, (0, 1, 2)), inputs, inputs)[1]

    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(tangents).lower(x, kernel, bias).out_info
    assert [x.dtype for x in found] == [jnp.bfloat16] * 3


def test_precision_reaches_every_product():
    x, kernel, labels, _, _, _ = case("plain", "float32")

    def loss(x, kernel):
        return linear_cross_entropy(x, kernel, labels, precision="highest").sum()

    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernel))
    assert text.count("dot_general") == text.count("precision=(Precision.HIGHEST") > 0


# ---- sizes


@pytest.mark.parametrize("tokens, words", [(0, 5), (0, 0), (3, 0), (1, 1), (2, 1025)])
def test_any_size(tokens, words):
    rng = np.random.default_rng(5)
    x, kernel = rng.standard_normal((tokens, 2)), rng.standard_normal((2, words))
    x, kernel = x.astype(f32), kernel.astype(f32)
    labels = np.full(tokens, words - 1)
    options = {"ignore_label": -1, "label_smoothing": 0.1, "chunk_size": (2, 512)}

    def call(x, kernel):
        return linear_cross_entropy(x, kernel, labels, return_lse=True, **options)

    @jax.jit
    def run(x, kernel):
        (loss, lse), pull = jax.vjp(call, x, kernel)
        _, tangent = jax.jvp(call, (x, kernel), (x, kernel))
        return loss, lse, tangent, pull((loss, lse))

    loss, lse, tangent, grads = run(x, kernel)
    assert loss.shape == lse.shape == tangent[0].shape == (tokens,)
    assert [g.shape for g in grads] == [x.shape, kernel.shape]
    if words == 0 or tokens == 0:
        assert not np.any(loss) and not np.any(lse) and not np.any(grads[0])
    else:
        truth = oracle(x, kernel, labels, (loss, lse), label_smoothing=0.1)
        for what, y in {"loss": loss, "lse": lse, "x": grads[0], "kernel": grads[1]}.items():
            np.testing.assert_allclose(y, truth[what], rtol=2e-6, atol=4e-6, err_msg=what)


def test_one_token_without_leading_dims():
    x, kernel, labels, _, _, _ = case("plain", "float32")
    loss = linear_cross_entropy(x[3], kernel, labels[3])
    assert loss.shape == ()
    np.testing.assert_allclose(loss, truth_of("plain", "float32")["loss"][3], atol=2e-6)


def test_tiles_are_nearly_of_one_size():
    def sides(tokens, words, most):
        array = jax.ShapeDtypeStruct
        inputs = loops.Inputs(array((tokens, 1), f32), array((1, words), f32), None, None)
        return loops.tile_sides(inputs, most)

    assert sides(2049, 128_256, (2048, 4096)) == (1152, 4096)
    assert sides(37, 53, (7, 11)) == (7, 11)
    assert sides(37, 53, (36, 52)) == (20, 28)  # a multiple of 4, as 36 and 52
    assert sides(5, 0, (7, 11)) == (5, 0)


# ---- memory


def compiled_gradient(tokens, words, features=64, dtype=f32, mapped=0, **options):
    """Return the compiled gradient of the mean loss by x and kernel."""
    array = jax.ShapeDtypeStruct
    leads = (mapped, tokens // mapped) if mapped else (tokens,)
    x = array((*leads, features), dtype)
    shapes = (x, array((features, words), dtype), array(leads, np.int32))

    def loss(x, kernel, labels):
        def one(x, labels):
            return linear_cross_entropy(x, kernel, labels, **options)

        losses = jax.vmap(one)(x, labels) if mapped else one(x, labels)
        return losses.mean()

    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()


def temp_bytes(*args, **kwargs) -> int:
    return compiled_gradient(*args, **kwargs).memory_analysis().temp_size_in_bytes


@pytest.fixture
def unsharded(monkeypatch):
    """Let tiles be as where JAX has one device."""
    monkeypatch.setattr(loops, "may_be_sharded", lambda: False)


def test_memory_is_linear_in_tokens_and_constant_in_words(unsharded):
    MIB = 2**20
    once = temp_bytes(16_384, 32_000)
    assert temp_bytes(32_768, 32_000) <= 2.15 * once
    assert temp_bytes(16_384, 64_000) <= once + MIB
    tile = 4 * 1024 * 1024
    x = 4 * 16_384 * 64
    assert once <= 3 * tile + 3 * x  # the logits take 2 GiB


def test_no_array_of_tokens_times_words(unsharded):
    text = compiled_gradient(4096, 8192, label_smoothing=0.1, z_loss=0.1).as_text()
    sizes = set()
    for shape in re.findall(r"[fs]32\[([\d,]+)\]", text):
        sizes.add(np.prod([int(n) for n in shape.split(",")]))
    assert max(sizes) == 1024 * 1024  # a tile


def test_memory_under_vmap_is_that_of_one_call(unsharded):
    """The gradient of a kernel that all calls share is not kept for each call."""
    one = temp_bytes(4096, 32_000, mapped=0)
    many = temp_bytes(4096, 32_000, mapped=64)
    assert many <= 1.5 * one
    assert one < 4 * 64 * 32_000 * 4  # four kernels


def test_the_gradient_keeps_no_float32_copy_of_a_16_bit_kernel(unsharded):
    """On a GPU. XLA:CPU widens 16-bit operands itself, so look at what is asked of it."""

    def loss(x, kernel, labels):
        return linear_cross_entropy(x, kernel, labels).sum()

    x = jax.ShapeDtypeStruct((2048, 64), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((64, 20_000), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((2048,), np.int32)
    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernel, labels).as_text()
    assert "tensor<64x20000xbf16>" in text
    assert "tensor<64x20000xf32>" not in text


# ---- wrong calls


def ones(*shape, dtype=f32):
    return np.ones(shape, dtype)


RIGHT = {"x": ones(2, 5, 8), "kernel": ones(8, 9), "labels": ones(2, 5, dtype=np.int32)}
WRONG = raising(
    ValueError,
    ({"x": f32(1)}, r"x must have shape \[\*B, H\] with at least 1 dim; got \(\)"),
    ({"kernel": ones(7, 9)}, r"kernel must have shape \(H=8, V\); got \(7, 9\)\.$"),
    (
        {"kernel": ones(9, 8)},
        r"kernel must have shape \(H=8, V\); got \(9, 8\)\. Transpose it: kernel\.T",
    ),
    ({"x": ones(2, 5, 0), "kernel": ones(0, 9)}, r"x has H=0 \(shape \(2, 5, 0\)\): .*Use H >= 1"),
    ({"kernel": ones(8)}, r"kernel must have shape \(H=8, V\); got \(8,\)"),
    (
        {"labels": ones(2, 5, 9, dtype=np.int32)},
        r"labels must have shape \(2, 5\), the leading dims of x; got \(2, 5, 9\)",
    ),
    (
        {"labels": 9 * ones(2, 5, dtype=np.int32)},
        r"labels must lie between 0 and V - 1 = 8; got 9\. Pass ignore_label",
    ),
    (
        {"labels": 9 * ones(2, 5, dtype=np.int32), "ignore_label": -1},
        r"labels must lie between 0 and V - 1 = 8; got 9\.$",
    ),
    ({"bias": ones(8)}, r"bias must have shape \(V=9,\), one number .*; got \(8,\)"),
    ({"ignore_label": 2**40}, r"ignore_label=1099511627776: it must fit in 32 bits"),
    ({"label_smoothing": 1}, r"label_smoothing=1: it must lie in \[0, 1\)"),
    ({"z_loss": -0.1}, r"z_loss=-0\.1: it must lie in \[0, inf\)"),
    ({"z_loss": float("nan")}, r"z_loss=nan: it must lie in \[0, inf\)"),
    ({"logits_soft_cap": 0}, r"logits_soft_cap=0: a cap must be > 0; use None for no"),
    (
        {"logits_soft_cap": ones(9)},
        r"logits_soft_cap must be a number or a scalar array, got shape \(9,\)\.$",
    ),
    ({"chunk_size": 0}, r"chunk_size=0: sides count tokens and words and must be >= 1"),
    ({"chunk_size": (1, 2, 3)}, r"chunk_size=.*: give \(tokens, words\), or one int"),
    (
        {"vocab_axis": "v"},
        r"vocab_axis='v': there is no such axis around this call\. Call it inside jax\.shard_map",
    ),
    ({"weights": ones(2, 5)}, r'weights need a reduction: pass reduction="mean" or'),
    (
        {"weights": ones(5), "reduction": "sum"},
        r"weights must have shape \(2, 5\), the leading dims of x; got \(5,\)",
    ),
    ({"reduction": "none"}, r"reduction='none' is not known: use None or one of 'mean', "),
    ({"reduction": True}, r"reduction=True is not known: use None or one of 'mean', "),
    (
        {"labels": np.full((2, 5), 2**32)},
        r"labels has integers that do not fit in int32: .*jax_enable_x64",
    ),
    ({"logits_soft_cap": jnp.float32(-5)}, r"logits_soft_cap=-5: a cap must be > 0"),
    ({"precision": "exact"}, r"precision='exact' must be None, \"default\""),
)
WRONG += raising(
    TypeError,
    ({"x": None}, r"x must be an array, got None"),
    ({"x": ones(2, 5, 8, dtype=np.int32)}, r"x must be a floating.* got int32\. Cast"),
    (
        {
            "x": jnp.ones((2, 5, 8), jnp.float8_e4m3fn),
            "kernel": jnp.ones((8, 9), jnp.float8_e4m3fn),
        },
        r"x is float8_e4m3fn: supported are bfloat16, float16, float32 and float64\. Cast it",
    ),
    (
        {"x": jnp.ones((2, 5, 8), jnp.bfloat16)},
        r"kernel is float32 and x is bfloat16: .* one dtype\. Cast .* kernel\.astype\(x\.dtype\)",
    ),
    ({"kernel": "words"}, r"kernel must be an array, got str 'words'"),
    ({"kernel": ones(8, 9, dtype=bool)}, r"kernel must be a floating.* got bool"),
    ({"labels": None}, r"labels must be an array, got None"),
    ({"labels": ones(2, 5)}, r"labels must be integers, got float32"),
    ({"bias": ones(9, dtype=bool)}, r"bias must be a floating-point array, got bool"),
    ({"ignore_label": 1.0}, r"ignore_label must be an int .*, got float 1\.0"),
    ({"ignore_label": True}, r"ignore_label must be an int .*, got bool True"),
    ({"label_smoothing": "a"}, r"label_smoothing must be a number .*, got str 'a'"),
    ({"z_loss": None}, r"z_loss must be a number .*, got None"),
    ({"chunk_size": 2.5}, r"chunk_size=2\.5: sides are ints \(tokens and words\), got"),
    ({"vocab_axis": 1}, r"vocab_axis must be the name of an axis of .*; got int 1"),
    (
        {"weights": ones(2, 5, dtype=bool), "reduction": "sum"},
        r"weights must be a floating-point array, got bool\. Cast it",
    ),
    ({"return_lse": 1}, r"return_lse must be True or False .*, got int 1"),
)


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_calls_are_cured_by_their_message(i):
    arguments, error, pattern = WRONG[i]
    with pytest.raises(error, match=pattern) as raised:
        linear_cross_entropy(**RIGHT | arguments)
    assert type(raised.value) is error
    message = str(raised.value)
    assert any(name in message for name in arguments), "the argument as the user typed it"
    assert len(message) < 300 and "\n" not in message, "one sentence, two at most"


def test_every_argument_has_a_wrong_call():
    tested = {name for arguments, *_ in WRONG for name in arguments}
    assert tested == set(inspect.signature(linear_cross_entropy).parameters)


def test_symbolic_sizes_are_refused():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("t, 8"), f32)
    with pytest.raises(NotImplementedError, match=r"x has shape \(t, 8\) .* symbolic\. Export"):
        jax.export.export(jax.jit(lambda x: linear_cross_entropy(x, RIGHT["kernel"], x[:, 0])))(x)


def test_the_overloads_have_the_signature():
    hints = typing.get_type_hints(linear_cross_entropy)
    overloads = typing.get_overloads(linear_cross_entropy)
    assert len(overloads) == 2
    keywords = typing.get_type_hints(LossOptions)
    assert keywords.items() <= hints.items()
    for overload in overloads:
        named = typing.get_type_hints(overload)
        assert named.keys() - {"options"} | keywords.keys() == hints.keys()
        for name in ("x", "kernel", "labels"):
            assert named[name] == hints[name], name
