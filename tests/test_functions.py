"""Functions of the user's own: scores, masks, block masks, transforms, sinks, statistics and the audit.

Against the oracle, which knows biases, masks and rotated inputs only: a score that adds something is a bias, with its chain
rule; against the quadratic definition where functions bend the score; and their memory.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import PAIRED, Sizes, _case, split
from conftest import cotangents, oracle_arguments
from test_memory import MIB, call, compiled, gradient, quadratic
from test_orders import orders

import memeff
from memeff import dot_product_attention, masks, scores, transforms
from memeff.block_mask import VisibleBlocks

slow = pytest.mark.slow
f32 = np.float32
SIZES = Sizes(B=2, T=19, S=29, K=2, G=2, H=6, D=4)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_complex_params(implementation):
    """They have the gradients that the function written out gives them; rotations by complex numbers, for example."""
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 6, 2, 4)) for n in range(3))
    turns = jnp.exp(1j * jnp.arange(6.0)[:, None] * jnp.array([1, 0.3]))  # position, pair

    def rotate(x, position, which, turns):
        y = jax.lax.complex(x[:2], x[2:]) * turns[position]
        return jnp.concatenate([y.real, y.imag])

    def score(s, batch, head, q_pos, k_pos, w):
        return s + (w[head] * (1 + 1j)).real

    def ours(w, turns):
        how = dict(score_fn=score, score_params=w, qk_transform=rotate, qk_transform_params=turns)
        return (dot_product_attention(q, k, v, implementation=implementation, **how) ** 2).sum()

    def written_out(w, turns):
        def turned(x):
            return jax.vmap(
                lambda x: jax.vmap(rotate, (0, 0, None, None))(x, jnp.arange(6), "", turns), 1, 1
            )(x[0])[None]

        s = (
            jnp.einsum("bthd,bshd->bhts", turned(q), turned(k)) / 2
            + (w * (1 + 1j)).real[:, None, None]
        )
        return (jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v) ** 2).sum()

    args = jnp.array([1 + 2j, 0.5 - 1j]), turns
    for x, y in zip(
        jax.grad(ours, (0, 1))(*args), jax.grad(written_out, (0, 1))(*args), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=2e-5)


def test_entropy_is_not_negative():
    """Also where one key takes all and logits are so large that they are rounded to tens."""
    for size in (10, 1000):
        x = size * jax.random.normal(jax.random.key(size), (1, 97, 2, 8))
        entropy = memeff.attention_statistics(x, x, x, chunk_size=32).entropy
        assert (entropy >= 0).all() and (size < 1000 or entropy.min() < 1e-6)


# ---- in pairs with what the core has, against the oracle


def _slopes(N):
    return np.linspace(0.1, 0.7, N)


def _rotate(x, position, back=False):
    """Halves of the last dim turned by position / 10000^(2 i / H), or back; position [.., T|S] beside the dims of x."""
    half = x.shape[-1] // 2
    angle = position[..., None] * 10000.0 ** (-np.arange(half) / half) * (-1 if back else 1)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
    )


def _positions(args, kwargs):
    """Of queries [B, T, 1] and keys [1, S, 1]."""
    (B, T, *_), S = args[0].shape, args[1].shape[1]
    offset = np.broadcast_to(np.asarray(kwargs.get("q_offset", 0)), (B,))
    return (np.arange(T) + offset[:, None])[..., None], np.arange(S)[None, :, None]


@functools.cache
def paired():
    """{feature: results} of calls with ALiBi, every third key hidden and rotary positions, in one program."""
    statics, inputs = {}, {}
    for feature in PAIRED:
        args, kwargs = _case(feature.__name__, feature, z=SIZES, chunk_size=(8, 12)).inputs(
            np.float64
        )
        statics[feature.__name__], arrays = split(kwargs)
        inputs[feature.__name__] = args, arrays, _slopes(SIZES.N), cotangents(args, "float64")

    def run(inputs):
        results = {}
        for name, (args, arrays, slopes, cts) in inputs.items():

            def attend(slopes, q, k, v, name=name, arrays=arrays):
                how = dict(
                    score_fn=scores.alibi(slopes),
                    mask_fn=~masks.dilated(3),
                    qk_transform=transforms.rotary(),
                )
                return dot_product_attention(
                    q, k, v, **arrays, **statics[name], **how, return_residual=True
                )

            found, pull = jax.vjp(attend, slopes, *args)
            results[name] = found, pull(cts)
        return results

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(run)(inputs))


@pytest.mark.parametrize("feature", [f.__name__ for f in PAIRED])
def test_functions_beside_every_feature(feature):
    (f,) = (f for f in PAIRED if f.__name__ == feature)
    args, kwargs = _case(feature, f, z=SIZES, chunk_size=(8, 12)).inputs(np.float64)
    q_pos, k_pos = _positions(args, kwargs)
    away = np.abs(q_pos[:, None] - k_pos[:, None].swapaxes(2, 3))  # b 1 t s
    seen = (q_pos[:, None] - k_pos[:, None].swapaxes(2, 3)) % 3 != 0
    turned = _rotate(args[0], q_pos), _rotate(args[1], k_pos), args[2]
    rest = oracle_arguments(args, kwargs, "float64")
    bias = rest.pop("bias", 0) - _slopes(SIZES.N)[:, None, None] * away
    how = dict(rest, bias=bias, mask=seen & rest.pop("mask", True))
    out, lse = oracle.attention(*turned, **how)
    dout, dlse = cotangents(args, "float64")
    of = oracle.gradients(*turned, **how, dout=dout, dlse=dlse)
    true = [
        -(of["bias"] * away).sum((0, 2, 3)),
        _rotate(of["query"], q_pos, True),
        _rotate(of["key"], k_pos, True),
    ]
    (found, found_lse), found_of = paired()[feature]
    np.testing.assert_array_equal(np.isinf(found_lse), np.isinf(lse))
    pairs = [(found, out), (np.where(np.isinf(lse), 0, found_lse), np.where(np.isinf(lse), 0, lse))]
    pairs += zip(found_of, [*true, of["value"]], strict=True)
    for actual, exact in pairs:  # the angles are of float32
        assert np.abs(actual - exact).max() <= 3e-6 * max(1, np.abs(exact).max())


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_counts_to_the_sides_that_may_be_seen(bidirectional):
    """Eight buckets up to 20 tokens, by hand: of keys behind the query, and of those ahead of it."""
    if bidirectional:  # four to each side: 0, 1, then from 2 and from 2 sqrt(10) on
        behind = [0, 1, *[2] * 5, *[3] * 14]
        ahead = [4 + bucket for bucket in behind[1:]]
    else:  # 0 to 3, then from 4, 6.0, 8.9 and 13.4 on; what is ahead is at distance 0
        behind = [0, 1, 2, 3, 4, 4, *[5] * 3, *[6] * 5, *[7] * 7]
        ahead = [0] * 20
    table = jnp.arange(8.0)[:, None]
    score = scores.t5(table, bidirectional=bidirectional, max_distance=20)
    found = score.fn(jnp.zeros(41), 0, 0, 20, jnp.arange(41), table)
    np.testing.assert_array_equal(found, [*behind[::-1], *ahead])


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    """Of queries and keys, each with scales of its own; epsilon counts where all is small."""
    x, scales = (
        np.random.default_rng(0).standard_normal(6),
        {"query": np.arange(1.0, 7), "key": np.arange(6.0) - 2},
    )
    norm = transforms.rms_norm(*scales.values(), epsilon=0.5)
    with jax.enable_x64(True):
        for which, scale in scales.items():
            found = norm.fn(jnp.asarray(x), 3, which, norm.params)
            np.testing.assert_allclose(found, x / np.sqrt((x**2).mean() + 0.5) * scale, rtol=1e-12)


# ---- what bends the score, in every order, against the definition


def _bent(implementation, q, k, v, score, transform, sinks):
    mask = (masks.causal() & masks.sliding_window(9)) | masks.prefix(jnp.array([2, 5]))
    how = dict(
        score_fn=score, mask_fn=mask, qk_transform=transform, sinks=sinks, return_residual=True
    )
    out, lse = dot_product_attention(
        q, k, v, **how, chunk_size=(8, 12), implementation=implementation
    )
    return jnp.sin(out).sum() + jnp.cos(lse).sum()


def _bent_inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape))
    q, k, v = draw(2, 21, 4, 6), draw(2, 21, 2, 6), draw(2, 21, 2, 3)
    score = (
        scores.t5(draw(8, 4))
        .then(scores.soft_cap(jnp.linspace(1.0, 3, 4)))
        .then(scores.relative(draw(4, 9)))
    )
    score = score.then(scores.head_temperature(1 + 0.1 * draw(4)))
    return (
        q,
        k,
        v,
        score,
        transforms.rms_norm(1 + 0.1 * draw(6), 1 + 0.1 * draw(6)).then(transforms.rotary()),
        draw(4),
    )


@pytest.mark.parametrize(
    "order", ["gradient", "jvp", "hvp", pytest.param("grad of grad", marks=slow)]
)
def test_what_bends_the_score_against_the_definition(order):
    def run(implementation):
        x = _bent_inputs()
        f = functools.partial(_bent, implementation)
        of = tuple(range(len(x)))
        along = lambda f: lambda *x: jax.jvp(f, x, x)[1]
        norm = lambda f: lambda *x: sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*x)))
        grad = jax.grad(f, of)
        return jax.jit(
            {
                "gradient": grad,
                "jvp": along(f),
                "hvp": along(grad),
                "grad of grad": jax.grad(norm(grad), of),
            }[order]
        )(*x)

    with jax.enable_x64(True):
        actual, plain = run(None), run("reference")
    assert jax.tree.structure(actual) == jax.tree.structure(plain)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(plain), strict=True):
        assert np.abs(x - y).max() <= 1e-9 * max(1, np.abs(y).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=slow)])
def test_functions_in_few_bits(dtype):
    """Gradients err at most 1.5 times as much as the plain computation's in the same dtype."""
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((2, n, h, d))
        for n, h, d in ((61, 4, 16), (61, 2, 16), (61, 2, 8), (61, 4, 8))
    ]
    arrays = [np.asarray(x, jnp.dtype(dtype)) for x in arrays]
    params = (
        np.linspace(0.02, 0.5, 4).astype(f32),
        (1 + 0.1 * rng.standard_normal((2, 16))).astype(f32),
    )

    def gradients(implementation, params, q, k, v, dout):
        def attend(params, q, k, v):
            slopes, (of_query, of_key) = params
            how = dict(
                score_fn=scores.alibi(slopes).then(scores.soft_cap(2.0)),
                mask_fn=masks.causal() & ~masks.dilated(5),
            )
            transform = transforms.rms_norm(of_query, of_key).then(transforms.rotary())
            how |= dict(qk_transform=transform, chunk_size=(16, 24), implementation=implementation)
            return dot_product_attention(q, k, v, **how)

        return jax.vjp(attend, params, q, k, v)[1](dout)

    with jax.enable_x64(True):
        wide = lambda x: jax.tree.map(lambda y: np.asarray(y, np.float64), x)
        run = lambda name, *x: wide(
            jax.tree.leaves(jax.jit(functools.partial(gradients, name))(*x))
        )
        exact = run("reference", *wide((params, *arrays)))
        actual, plain = (run(name, params, *arrays) for name in (None, "reference"))
    for x, y, true in zip(actual, plain, exact, strict=True):
        eps = {"float32": 4e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype] * max(
            1, np.abs(true).max()
        )
        assert np.abs(x - true).max() <= 1.5 * np.abs(y - true).max() + eps


def test_sinks_take_what_a_key_without_a_value_would():
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, n, h, 5)), f32) for n, h in ((9, 4), (7, 2), (7, 2))
    )
    sinks = jnp.array([-1.0, 0.3, 2, 9])
    with_key = (
        jnp.concatenate([k, jnp.zeros((2, 1, 2, 5))], 1),
        jnp.concatenate([v, jnp.zeros((2, 1, 2, 5))], 1),
    )
    bias = jnp.concatenate([jnp.zeros((4, 1, 7)), sinks[:, None, None]], -1)
    loss = lambda f: lambda *x: (jnp.sin(f(*x))).sum()
    plain = lambda q, k, v, sinks: dot_product_attention(q, *with_key, bias.at[:, 0, 7].set(sinks))
    ours = lambda q, k, v, sinks: dot_product_attention(q, k, v, sinks=sinks)
    np.testing.assert_allclose(ours(q, k, v, sinks), plain(q, k, v, sinks), atol=1e-6)
    for n in (0, 3):
        a, b = (jax.grad(loss(f), n)(q, k, v, sinks) for f in (ours, plain))
        np.testing.assert_allclose(a, b, atol=2e-6)
    hidden = dot_product_attention(q, k, v, mask=jnp.zeros((7,), bool), sinks=sinks)
    assert not np.asarray(hidden).any()


# ---- block masks


def test_block_mask_skips_the_tiles_that_its_picture_hides():
    ids = np.repeat(np.arange(4), [5, 11, 20, 17])
    mask = masks.causal() & masks.documents(ids)
    block = memeff.block_mask(mask, 53, block_size=4)
    whole = (ids[:, None] == ids) & np.tril(np.ones((53, 53), bool))
    for t, c in ((4, 4), (8, 12), (16, 4), (53, 53), (7, 13)):
        some, every = block.blocks.visible_tiles(t, c)
        for i, j in np.ndindex(some.shape):
            tile = whole[i * t : (i + 1) * t, j * c : (j + 1) * c]
            assert some[i, j] >= tile.any() and every[i, j] <= tile.all()
            if t % 4 == c % 4 == 0:
                assert some[i, j] == tile.any() and every[i, j] == tile.all()
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 53, 2, 4)), f32) for _ in range(3))

    def both(mask):
        f = lambda q, k, v: dot_product_attention(q, k, v, mask_fn=mask, chunk_size=(8, 12))
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(jnp.cos(out))

    for a, b in zip(jax.jit(lambda: both(mask))(), jax.jit(lambda: both(block))(), strict=True):
        np.testing.assert_array_equal(a, b)
    visited = int(
        memeff.explain(q, k, v, mask_fn=block, chunk_size=(8, 12))
        .split(" of 35 visited")[0]
        .split()[-1]
    )
    assert visited == block.blocks.visible_tiles(8, 12)[0].sum() < 35


def test_block_mask_of_batch_and_heads():
    """Visited where some batch entry and head sees something."""
    lengths = jnp.array([3, 30])
    block = memeff.block_mask(masks.prefix(lengths), 8, 64, batch=2, block_size=8)
    assert (
        block.blocks.any_visible.tolist() == [[True] * 4 + [False] * 4]
        and not block.blocks.all_visible.any()
    )
    per_head = memeff.block_mask(lambda b, h, q, k, p: k >= 8 * h, 8, 32, heads=3, block_size=8)
    assert per_head.blocks.any_visible.all() and per_head.blocks.all_visible.tolist() == [
        [False, False, True, True]
    ]
    assert per_head.sparsity == 0


def test_block_masks_are_equal_by_what_they_say():
    make = lambda n: memeff.block_mask(masks.sliding_window(n), 64, block_size=8).blocks
    assert (
        make(8) == make(8)
        and hash(make(8)) == hash(make(8))
        and make(8) != make(9)
        and isinstance(make(8), VisibleBlocks)
    )


# ---- memory


def packed(T):
    return masks.causal() & masks.documents(np.arange(T) // 3000)


EXTRAS = {  # of T tokens, 2 heads
    "score": lambda _: dict(
        score_fn=scores.alibi(jnp.ones(2)).then(scores.t5(jnp.ones((32, 2), f32))), is_causal=True
    ),
    "mask": lambda T: dict(mask_fn=packed(T)),
    "block mask": lambda T: dict(mask_fn=memeff.block_mask(packed(T), T)),
    "transform": lambda _: dict(qk_transform=transforms.rotary(), is_causal=True),
    "sinks": lambda _: dict(sinks=jnp.ones(2), is_causal=True),
}


@functools.cache
def extra_program(kind, order, T):
    forward, shapes = call(T, N=2, **EXTRAS[kind](T))
    of = {"gradient": gradient(forward)} | orders(forward)
    return compiled(of[order], shapes)


KINDS = [
    kind if kind in ("score", "block mask") else pytest.param(kind, marks=slow) for kind in EXTRAS
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["gradient", pytest.param("grad of grad", marks=slow)])
def test_memory_of_functions_grows_with_the_sequence(kind, order):
    T = 8192 if kind == "block mask" else 16384  # whose blocks are found pair by pair
    once, twice = (
        extra_program(kind, order, n).memory_analysis().temp_size_in_bytes for n in (T, 2 * T)
    )
    assert twice <= 2.15 * once, f"{once / MIB:.1f} MiB, twice the tokens {twice / MIB:.1f} MiB"
    assert not quadratic(extra_program(kind, order, T).as_text(), T)


def test_gradient_of_a_table_costs_its_own_size():
    """32 heads: T5's table has 1,024 numbers, its pairs 2^29."""
    x = jax.ShapeDtypeStruct((1, 4096, 32, 8), f32)
    f = lambda x, table: dot_product_attention(
        x, x, x, score_fn=scores.t5(table), is_causal=True
    ).sum()
    table = jax.ShapeDtypeStruct((32, 32), f32)
    with_table = compiled(jax.grad(f, 1), (x, table)).memory_analysis().temp_size_in_bytes
    assert with_table <= 64 * MIB, f"{with_table / MIB:.1f} MiB"


# ---- statistics


def _plain_statistics(q, k, v):
    """In NumPy: causal with offset 2 of q [T, H], k [S, H], v [S, D], one head."""
    T, S = len(q), len(k)
    seen = np.arange(S) <= np.arange(T)[:, None] + 2 - 4  # the first rows see nothing
    s = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    some = seen.any(-1)
    m = np.where(some, s.max(-1), 0)
    e = np.exp(s - m[:, None])
    l = np.where(some, e.sum(-1), 1)
    p = e / l[:, None]
    logp = np.where(seen, s - m[:, None] - np.log(l)[:, None], 0)
    away = np.abs(np.arange(T)[:, None] - 2 - np.arange(S))
    none = lambda x: np.where(some, x, -np.inf)
    return p @ v, none(m + np.log(l)), -(p * logp).sum(-1), none(m), (p * away).sum(-1), p.sum(0)


def test_statistics_and_key_mass():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, d)) * 3 for n, d in ((23, 5), (31, 5), (31, 4)))
    how = dict(is_causal=True, q_offset=-2, chunk_size=(8, 12))
    with jax.enable_x64(True):
        found = jax.jit(lambda *x: memeff.attention_statistics(*x, **how))(q, k, v)
        mass = memeff.key_mass(q, k, **how)
    for actual, true in zip(
        (*found, mass), _plain_statistics(q[0, :, 0], k[0, :, 0], v[0, :, 0]), strict=True
    ):
        np.testing.assert_allclose(np.asarray(actual)[0, :, 0], true, atol=1e-12)


def test_statistics_differentiate():
    """Against differences of NumPy's, and second order against differences of the first."""
    rng = np.random.default_rng(1)
    x = [rng.standard_normal((1, n, 1, d)) for n, d in ((9, 5), (11, 5), (11, 4))]
    along = [rng.standard_normal(y.shape) for y in x]
    weights = [rng.standard_normal(size) for size in ((9, 4), 9, 9, 9, 9, 11)]

    def loss(*x):
        how = dict(is_causal=True, q_offset=-2, chunk_size=(4, 5))
        found = *memeff.attention_statistics(*x, **how), memeff.key_mass(*x[:2], **how)
        return sum(
            (w * jnp.where(jnp.isfinite(y), y, 0)[0, :, 0]).sum()
            for w, y in zip(weights, found, strict=True)
        )

    def plain(step):
        found = _plain_statistics(*((y + step * d)[0, :, 0] for y, d in zip(x, along, strict=True)))
        return sum(
            (w * np.where(np.isfinite(y), y, 0)).sum() for w, y in zip(weights, found, strict=True)
        )

    with jax.enable_x64(True):
        both = jax.jit(
            lambda *x: (jax.jvp(loss, x, tuple(along))[1], jax.grad(loss, (0, 1, 2))(*x))
        )
        tangent, of = jax.tree.map(np.asarray, both(*x))
        slope = jax.jit(
            lambda s: jax.grad(lambda s: loss(*(y + s * d for y, d in zip(x, along, strict=True))))(
                s
            )
        )
        second = float(jax.jit(jax.grad(slope))(0.0))
        h = 1e-4
        bend = float(slope(h) - slope(-h)) / (2 * h)
    numeric = (8 * (plain(1e-3) - plain(-1e-3)) - plain(2e-3) + plain(-2e-3)) / 12e-3
    assert abs(tangent - numeric) <= 1e-8 * abs(numeric)
    assert abs(sum((g * d).sum() for g, d in zip(of, along, strict=True)) - numeric) <= 1e-8 * abs(
        numeric
    )
    assert abs(second - bend) <= 1e-6 * max(1, abs(bend))


def test_the_gradient_of_the_largest_logit_is_shared_by_what_rounding_may_part():
    """The walk finds it in one order of sums and looks for it in another: a logit one rounding below is as large."""
    q, k = jnp.ones((1, 1, 1, 1), f32), jnp.array([1 - 2**-23, 0.5, 1], f32).reshape(1, 3, 1, 1)
    of = jax.grad(lambda k: memeff.attention_statistics(q, k, k, scale=1.0).max_logit.sum())(k)
    np.testing.assert_array_equal(of.ravel(), [0.5, 0, 0.5])


def test_the_gradient_of_the_largest_logit_is_shared():
    """By keys that are equal."""
    q, k = jnp.ones((1, 1, 1, 3)), jnp.ones((1, 4, 1, 3)).at[:, 2].set(0)
    of = jax.grad(lambda k: memeff.attention_statistics(q, k, k, scale=1.0).max_logit.sum())(k)
    np.testing.assert_allclose(of[0, :, 0, 0], [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)


# ---- the audit


def _audited(dtype, T=150, S=170):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.standard_normal((2, n, h, 8)), dtype) for n, h in ((T, 4), (S, 2), (S, 2))
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_audit_finds_nothing_where_nothing_is(implementation, dtype):
    how = dict(is_causal=True, q_offset=20, logits_soft_cap=3.0, qk_transform=transforms.rotary())
    # whose rows, turned, are rounded to 8 bits: that is no rounding of attention's
    if dtype == "bfloat16":
        how.pop("qk_transform")
    found = memeff.audit(
        implementation, *_audited(dtype), samples=16, score_fn=scores.alibi(jnp.full(4, 0.1)), **how
    )
    assert found.ok, str(found)
    assert [x.name for x in found.findings] == ["lse", "out", "query", "key", "value"]
    assert found.findings[0].relative < 1e-6


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _swap(q, k, v, how):
    return jax.nn.dot_product_attention(q, k, v, **dict(how))


def _swap_backward(how, pull, dout):
    dq, dk, dv = pull(dout)
    return dq, dv, dk


_swap.defvjp(
    lambda *x: jax.vjp(lambda *y: jax.nn.dot_product_attention(*y, **dict(x[3])), *x[:3]),
    _swap_backward,
)


DEFECTS = {
    "scale": lambda q, k, v, **how: jax.nn.dot_product_attention(q, k, v, scale=0.36, **how),
    "last keys": lambda q, k, v, **how: jax.nn.dot_product_attention(
        q, k[:, :-9], v[:, :-9], **how
    ),
    "not causal": lambda q, k, v, **how: jax.nn.dot_product_attention(q, k, v),
    "dk and dv swapped": lambda q, k, v, **how: _swap(q, k, v, tuple(how.items())),
    "gradient of keys lost": lambda q, k, v, **how: jax.nn.dot_product_attention(
        q, jax.lax.stop_gradient(k), v, **how
    ),
    "one group": lambda q, k, v, **how: jax.nn.dot_product_attention(
        q, k[:, :, ::-1], v[:, :, ::-1], **how
    ),
    "NaN": lambda q, k, v, **how: (
        jax.nn.dot_product_attention(q, k, v, **how).at[1, 3].set(jnp.nan)
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_audit_finds_what_is_planted(dtype):
    q, k, v = _audited(dtype, 150, 150)
    assert memeff.audit(jax.nn.dot_product_attention, q, k, v, is_causal=True, samples=150).ok
    # which has no say on a CPU
    assert memeff.audit(None, q, k, v, is_causal=True, samples=150, backward="fastest").ok
    with pytest.raises(NotImplementedError, match='backward="fused" cannot run this call'):
        memeff.audit(None, q, k, v, is_causal=True, backward="fused")
    for name, f in DEFECTS.items():
        found = memeff.audit(f, q, k, v, is_causal=True, samples=150)
        assert not found.ok and "NOT ok" in str(found), f"{name}\n{found}"


def test_audit_knows_gradients_that_cancel():
    """Of equal keys and values dq and dk are 0 but for rounding."""
    x = jnp.ones((1, 200, 2, 16))
    for f in ("xla", jax.nn.dot_product_attention):
        found = memeff.audit(f, x, x, x, samples=16)
        assert found.ok, str(found)


# ---- what is refused


def _if(score, batch, head, q_pos, k_pos, params):
    return score if q_pos > k_pos else -score


WRONG = [
    (
        dict(score_fn=3),
        TypeError,
        r"score_fn must be a function \(score, batch, head, q_pos, k_pos, params\), got int",
    ),
    (
        dict(score_fn=lambda s, b, h: s),
        TypeError,
        r"score_fn must be hashable and take \(score, batch, head, q_pos, k_pos",
    ),
    (dict(score_fn=_if), TypeError, r"score_fn needs the value .* use jnp\.where instead of if"),
    (
        dict(score_fn=lambda s, *at: s[None]),
        TypeError,
        r"must return one float32; got float32\[1\]",
    ),
    (
        dict(score_fn=lambda s, *at: at[2]),
        TypeError,
        r"must return one float32; got int32\[\]",
    ),
    (
        dict(score_fn=lambda s, *at: (s, s)),
        TypeError,
        r"must return one float32; got float32\[\], float32\[\]",
    ),
    (
        dict(score_fn=lambda s, *at: s * jnp.ones(3)),
        TypeError,
        r"is called with scalars, for one pair.*float32\[3\]",
    ),
    (
        dict(score_fn=scores.alibi(np.ones(3))),
        ValueError,
        r"score_fn has params for N=3 heads, but this call has N=4",
    ),
    (
        dict(score_fn=scores.soft_cap(1.0).then(scores.t5(np.ones((8, 2))))),
        ValueError,
        r"score_fn has params for N=2 heads",
    ),
    (
        dict(score_fn=scores.relative(np.ones((5, 9)))),
        ValueError,
        r"score_fn has params for N=5 heads",
    ),
    (
        dict(mask_fn=masks.causal() | masks.prefix(np.ones(3, int))),
        ValueError,
        r"mask_fn has params for B=3 batch entries, but this call has B=2",
    ),
    (
        dict(mask_fn=~masks.documents(np.zeros(7, int), np.zeros(6, int))),
        ValueError,
        r"mask_fn has params for S=6 key positions, but this call has S=7",
    ),
    (
        dict(mask_fn=memeff.block_mask(lambda b, h, i, j, p: i > b, 5, 7)),
        ValueError,
        r"made with batch=1, and this call has B=2",
    ),
    (
        dict(mask_fn=memeff.block_mask(lambda b, h, i, j, p: i > h, 5, 7, heads=2)),
        ValueError,
        r"made with heads=2, and this call has N=4",
    ),
    (dict(score_params=1), ValueError, r"score_params came without score_fn: pass both"),
    (
        dict(score_fn=scores.alibi(np.ones(4)), score_params=1),
        ValueError,
        r"Pass either score_params or a `memeff\.Score`, which carries its own params",
    ),
    (
        dict(mask_fn=lambda *at: at[2] - at[3]),
        TypeError,
        r"mask_fn is called with scalars.* one bool; got int32\[\]",
    ),
    (dict(mask_params=1), ValueError, r"mask_params came without mask_fn: pass both"),
    (
        dict(qk_transform=lambda x, position, which, p: x[:2]),
        TypeError,
        r"qk_transform must return a row like that of a query",
    ),
    (
        dict(qk_transform=lambda x: x),
        TypeError,
        r"qk_transform must be hashable and take \(x, position, which, params\)",
    ),
    (
        dict(qk_transform_params=1),
        ValueError,
        r"qk_transform_params came without qk_transform: pass both",
    ),
    (
        dict(sinks=np.ones(3)),
        ValueError,
        r"sinks must be floats of shape \(N=4,\), a logit for each head",
    ),
    (
        dict(mask_fn=memeff.block_mask(masks.causal(), 9, block_size=4)),
        ValueError,
        r"block mask of T, S = \(9, 9\), .*\(5, 7\)",
    ),
    (
        dict(mask_fn=memeff.block_mask(masks.causal(), 5, 7, block_size=4), q_offset=2),
        ValueError,
        r"block mask, whose positions begin at 0, and q_offset is given",
    ),
]


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_functions_are_refused_in_a_sentence(i):
    how, error, words = WRONG[i]
    q, k, v = np.ones((2, 5, 4, 8), f32), np.ones((2, 7, 2, 8), f32), np.ones((2, 7, 2, 6), f32)
    with pytest.raises(error, match=words):
        dot_product_attention(q, k, v, **how)


def test_a_function_that_closes_over_a_tracer_is_refused():
    x = jnp.ones((1, 5, 1, 4))
    with pytest.raises(
        ValueError,
        match=r"score_fn closes over a traced array of shape \(\): pass it in score_params",
    ):
        jax.jit(lambda w: dot_product_attention(x, x, x, score_fn=lambda s, *at: s * w))(2.0)
    kept = dot_product_attention(x, x, x, score_fn=lambda s, b, h, i, j, w: s * w, score_params=2.0)
    np.testing.assert_allclose(kept, x)
    with pytest.raises(ValueError, match="block_mask: params are traced"):
        jax.jit(lambda n: memeff.block_mask(masks.prefix(n), 8).blocks.any_visible)(3)


def test_a_block_mask_of_numpy_arrays_is_made_inside_jit():
    make = lambda: (
        memeff.block_mask(
            masks.causal() & masks.documents(np.arange(8) // 3), 8, block_size=2
        ).blocks
    )
    inside = jax.jit(lambda x: x + make().any_visible)(0)
    np.testing.assert_array_equal(inside, make().any_visible)


def test_statistics_and_audit_refuse():
    x = jnp.ones((1, 5, 1, 4))
    with pytest.raises(
        TypeError, match="attention_statistics does not take return_residual, sinks"
    ):
        memeff.attention_statistics(x, x, x, sinks=jnp.ones(1), return_residual=True)
    with pytest.raises(TypeError, match="memeff.audit runs outside jit"):
        jax.jit(lambda x: memeff.audit(None, x, x, x).samples)(x)


def test_one_trace_for_params_that_differ_in_numbers_only():
    traces = []

    def score(s, batch, head, q_pos, k_pos, w):
        traces.append(1)
        return s * w

    f = jax.jit(lambda x, w: dot_product_attention(x, x, x, score_fn=score, score_params=w))
    x = jnp.ones((1, 5, 1, 4))
    f(x, 1.0)
    count = len(traces)
    f(x, 2.0)
    assert len(traces) == count
