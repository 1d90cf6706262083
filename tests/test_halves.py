"""The fused backward (memeff.xla, on GPUs; here forced), through float16 for bfloat16: exact for every input, by its check;
joined tiles; blocks.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_as_good
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memeff import dot_product_attention, tile_sizes
from memeff.chunked import fixed_max, gpu_fusion, row_sums, schedule
from memeff.chunked import implementation as chunked
from memeff.problem import LogitParams, Operands, Problem

B, T, S, K, G, H, D = 2, 70, 90, 2, 2, 16, 11


def draw(name: str, dtype=jnp.bfloat16):
    """query [B, T, K, G, H], key [B, S, K, H], value [B, S, K, D], dout [B, K, G, T, D]; the named property planted."""
    rng = np.random.default_rng(3)
    q, k, v, dout = (
        rng.standard_normal(s)
        for s in ((B, T, K, G, H), (B, S, K, H), (B, S, K, D), (B, K, G, T, D))
    )
    match name:
        case "rows of dout from 1 to 2^-20":
            dout *= 2.0 ** -rng.integers(0, 21, (B, K, G, T, 1))
        case "tiny dout":
            dout *= 1e-20
        case "huge dout":
            dout *= 1e20
        case "rows of dout that are 0":
            dout[:, :, :, ::3] = 0
        case "values from 1 to 2^-6":
            v *= 2.0 ** -rng.integers(0, 7, (B, S, K, 1))
        case "values from 1 to 2^-15":
            v *= 2.0 ** -rng.integers(0, 16, (B, S, K, 1))
        case "a value that is 0":
            v[1, 7] = 0
        case "logits of 10^3":
            q, k = q * 20, k * 12
        # and in causal order the only row that sees the last key
        case "one row of dout 2^-40 beside others":
            dout[0, :, :, -1] *= 2.0**-40
        case "one value 10^9 beside others":
            v[1, 3] *= 1e9
        case "ordinary":
            pass
    return [jnp.asarray(x, dtype) for x in (q, k, v, dout)]


FAR = (
    "one row of dout 2^-40 beside others",
    "one value 10^9 beside others",
    "values from 1 to 2^-15",
)
NEAR = (
    *(
        "ordinary",
        "rows of dout from 1 to 2^-20",
        "tiny dout",
        "huge dout",
        "rows of dout that are 0",
    ),
    *("values from 1 to 2^-6", "a value that is 0", "logits of 10^3"),
)
WALKS = {
    "full": dict(),
    "causal": dict(right=0, q_offset=S - T),
    "causal joined": dict(right=0, q_offset=S - T, joined=4096),
    "window": dict(left=30, right=10, q_offset=3),
}


def problem(walk: str, fused: bool = True) -> Problem:
    sizes = dict(
        chunk_size=(24, 32), fixed_chunk_size=(16, 16), fused_chunk_size=(16, 16) if fused else None
    )
    return Problem(scale=H**-0.5, **sizes, **WALKS[walk])


@functools.cache
def gradients(walk: str, fused: bool, block=None):
    """A call for training, as on a GPU (lse from the sums of rounded p) or step by step."""

    def run(q, k, v, dout):
        p, operands = dataclasses.replace(problem(walk, fused), block=block), Operands(q, k, v)
        forward = chunked.forward(p, operands, "gradient")
        return chunked.backward(p, operands, *forward, dout, None)[:3]

    return jax.jit(run)


@functools.cache
def compiled_forward(p: Problem, lse_for: str = "caller"):
    """The forward of a problem, compiled once for all draws."""
    return jax.jit(lambda operands: chunked.forward(p, operands, lse_for))


@functools.cache
def program_of_serves(walk: str):
    def run(q, k, v, dout):
        out, _ = chunked.forward(problem(walk), Operands(q, k, v))
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        halves = gpu_fusion.fp16_scales(
            problem(walk), Operands(q, k, v), delta, dout.transpose(0, 3, 1, 2, 4)
        )
        assert halves is not None
        return halves.serve.all()

    return jax.jit(run)


def serves(walk: str, q, k, v, dout) -> bool:
    return bool(program_of_serves(walk)(q, k, v, dout))


FAST = ("causal joined", "bfloat16"), ("full", "float32")


@pytest.mark.parametrize(
    ("walk", "dtype"),
    [
        pair if pair in FAST else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(
            ("full", "causal joined", "causal", "window"), ("bfloat16", "float32")
        )
    ],
)
def test_fused_is_as_good(walk, dtype):
    """As the walk step by step, the baseline here. In bfloat16 11 bits are kept in the middle, elsewhere all."""
    names = [*NEAR, *FAR]
    # XLA:CPU rounds scale * raw - lse once here, twice elsewhere; for GPUs see test_gpu.py
    if dtype == "float32":
        names.remove("logits of 10^3")
    for name in names:
        arrays = draw(name, dtype)
        assert dtype == "float32" or serves(walk, *arrays) == (name in NEAR), name
        found, general = (gradients(walk, fused)(*arrays) for fused in (True, False))
        q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
        p = problem(walk)
        call = dict(
            query=q.reshape(B, T, K * G, H), key=k, value=v, scale=H**-0.5, q_offset=p.q_offset
        )
        call |= dict(local_window_size=(p.left, p.right))
        flat = np.moveaxis(dout, 3, 1).reshape(B, T, K * G, D)
        true = oracle.gradients(**call, dout=flat, dlse=np.zeros((B, T, K * G)))
        truth = true["query"].reshape(B, T, K, G, H), true["key"], true["value"]
        for what, x, base, exact in zip(("dq", "dk", "dv"), found, general, truth, strict=True):
            # dout is scaled by up to 1e20: the law is of numbers near 1
            size = max(np.abs(exact).max(), 1e-30)
            assert_as_good(
                np.float64(x) / size,
                [np.float64(base) / size],
                exact / size,
                dtype,
                f"{name}: {what}",
            )


@pytest.mark.parametrize(
    "dtype, walk, block",
    [
        ("bfloat16", "causal joined", (2, 1)),
        pytest.param("bfloat16", "full", (1, 1), marks=pytest.mark.slow),
        pytest.param("float32", "causal joined", (1, 2), marks=pytest.mark.slow),
        pytest.param("bfloat16", "window", (1, 1), marks=pytest.mark.slow),
        pytest.param("float32", "full", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_block_by_block(dtype, walk, block):
    arrays = draw("ordinary", dtype)
    for x, y in zip(
        gradients(walk, True, block)(*arrays), gradients(walk, True)(*arrays), strict=True
    ):
        np.testing.assert_allclose(
            np.float32(x), np.float32(y), atol=2e-2 if dtype == "bfloat16" else 1e-5
        )
    operands = Operands(
        *arrays[:3], LogitParams(sinks=jnp.linspace(-1.0, 3.0, K * G).reshape(K, G))
    )
    out, lse = (
        compiled_forward(dataclasses.replace(problem(walk), block=b))(operands)
        for b in (block, None)
    )
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(lse), strict=True):
        np.testing.assert_allclose(
            np.float32(x), np.float32(y), atol=2e-2 if dtype == "bfloat16" else 1e-5
        )


@pytest.mark.slow
def test_blocks_under_shard_map(monkeypatch):
    """Where blocks are walked although there are several devices; as on one device, in bits."""
    sizes = dict(fixed_chunk_size=(16, 16), fused_chunk_size=(16, 16), joined=2048, block=(1, 1))
    monkeypatch.setattr(
        tile_sizes, "default_tiles", lambda *args: tile_sizes.Tiles((16, 16), **sizes)
    )
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(AxisType.Explicit,) * 2)
    spec, whole = (
        PartitionSpec("batch", None, "heads"),
        jax.random.normal(jax.random.key(0), (4, 4, 70, 2, 16), jnp.bfloat16),
    )

    def call(q, k, v, dout):
        out, pull = jax.vjp(functools.partial(dot_product_attention, is_causal=True), q, k, v)
        return out, *pull(dout)

    wanted = jax.jit(call)(*whole)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]
        found = jax.jit(jax.shard_map(call, in_specs=spec, out_specs=spec))(*arrays)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.float32(x), np.float32(y))


@pytest.mark.parametrize("name", ["ordinary", "logits of 10^3"])
def test_lse_for_the_gradient_is_as_good_as_a_probability(name):
    """In bfloat16: off by 2^-9 at most, where one key has all; what the caller gets is exact."""
    q, k, v, _ = draw(name)
    _, exact = compiled_forward(problem("full", False))(Operands(q, k, v))
    _, for_caller = compiled_forward(problem("full"))(Operands(q, k, v))
    _, for_gradient = compiled_forward(problem("full"), "gradient")(Operands(q, k, v))
    np.testing.assert_allclose(for_caller.high, exact.high, rtol=1e-6, atol=1e-6)
    # the logarithm of 1 + 2^-9, and of what float32 adds
    assert abs(for_gradient.high - exact.high).max() <= 2.0**-9 * 1.01


@functools.cache
def forward_and_backward(walk: str):
    """Return the compiled forward, and the compiled backward by whether it is fused. Operands are not constants, so that all
    draws share them.
    """

    @jax.jit
    def forward(q, k, v):
        return chunked.forward(problem(walk), Operands(q, k, v), "gradient")

    def backward(fused, q, k, v, results, dout):
        return chunked.backward(problem(walk, fused), Operands(q, k, v), *results, dout, None)

    return forward, {fused: jax.jit(functools.partial(backward, fused)) for fused in (True, False)}


@pytest.mark.parametrize("walk", ["full", "causal joined"])
@pytest.mark.parametrize("name", FAR)
def test_what_float16_cannot_hold_goes_the_general_way(name, walk):
    q, k, v, dout = draw(name)
    forward, backward = forward_and_backward(walk)
    results = forward(q, k, v)
    found, general = (backward[fused](q, k, v, results, dout) for fused in (True, False))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(general), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_check_is_needed(monkeypatch):
    """Without it the last key, which one row sees, and that one 2^-40 as large as others, would get no gradient at all."""
    arrays = draw(FAR[0])
    wanted = gradients("causal", False)(*arrays)[2][0, -1]
    assert jnp.abs(wanted).min() > 0
    monkeypatch.setattr("memeff.chunked.backward.all_true", lambda ok: True)
    p, operands = problem("causal"), Operands(*arrays[:3])
    unchecked = chunked.backward(
        p, operands, *gradients_forward(p, operands), arrays[3], None
    ).value[0, -1]
    assert jnp.abs(unchecked).max() == 0


def gradients_forward(p, operands):
    return row_sums.normalise(
        operands, fixed_max.fixed_max_forward(p, operands, "gradient"), fixed_max.log_sum_exp_wide
    )


@pytest.mark.parametrize("what", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["query", "key", "value", "dout"])
def test_what_is_not_finite_reaches_the_same_gradients(which, what):
    """Of dv only where no lse is NaN: of such a row p is NaN for all keys of a masked tile."""
    q, k, v, dout = draw("ordinary")
    match which:
        case "query":
            q = q.at[1, 20, 0, 1, 3].set(what)
        case "key":
            k = k.at[1, 60, 0, 3].set(what)
        case "value":
            v = v.at[1, 7, 0, 2].set(what)
        case "dout":
            dout = dout.at[1, 0, 1, 20, 3].set(what)
    found, general = (gradients("causal", fused)(q, k, v, dout) for fused in (True, False))
    for x, y in list(zip(found, general, strict=True))[: 3 if which in ("value", "dout") else 2]:
        np.testing.assert_array_equal(jnp.isfinite(x), jnp.isfinite(y))


def test_hidden_values_change_no_bit():
    """Of keys that no row sees: not by their size, which a bound or the check could have read."""
    q, k, v, dout = draw("ordinary")
    p = dataclasses.replace(problem("causal"), q_offset=0)  # keys from T on are hidden

    def run(v):
        operands = Operands(q, k, v)
        return chunked.backward(p, operands, *chunked.forward(p, operands), dout, None)[:3]

    run = jax.jit(run)
    for what in (1e30, np.nan, np.inf):
        for x, y in zip(run(v), run(v.at[:, T:].set(what)), strict=True):
            np.testing.assert_array_equal(x, y)


def test_under_vmap_one_answer_for_the_batch():
    arrays = [jnp.stack([a, b]) for a, b in zip(draw("ordinary"), draw(FAR[0]), strict=True)]
    mapped = jax.jit(jax.vmap(gradients("causal", True)))
    jaxpr = str(jax.make_jaxpr(mapped)(*arrays))
    assert "cond[" in jaxpr
    for n in (0, 1):
        for x, y in zip(
            mapped(*arrays), gradients("causal", False)(*(x[n] for x in arrays)), strict=True
        ):
            np.testing.assert_allclose(np.float32(x[n]), np.float32(y), atol=0.05)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_sharded_batch_and_heads_are_not_gathered(types, monkeypatch):
    """Besides the answers to two checks, over two axes of the mesh, devices exchange nothing."""
    sizes = dict(fixed_chunk_size=(16, 16), fused_chunk_size=(16, 16), joined=2048)
    monkeypatch.setattr(
        tile_sizes, "default_tiles", lambda *args: tile_sizes.Tiles((16, 16), **sizes)
    )
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(types, types))
    whole = [jax.random.normal(jax.random.key(i), (8, 70, 4, 16), jnp.bfloat16) for i in range(4)]

    @jax.jit
    def call(q, k, v, dout):
        out, pull = jax.vjp(functools.partial(dot_product_attention, is_causal=True), q, k, v)
        return out, *pull(dout)

    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(x, NamedSharding(mesh, PartitionSpec("batch", None, "heads")))
            for x in whole
        ]
        program = call.lower(*arrays).compile()
        found = program(*arrays)
    text = program.as_text()
    assert not re.search("all-gather|all-to-all|collective-permute", text)
    exchanged = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    scalars = [scalar for what in exchanged for scalar in what.strip("()").split(", ")]
    assert len(scalars) == 4 and all(re.match(r"(pred|s32|u32|s8|u8)\[\]", x) for x in scalars), (
        exchanged
    )
    for x, y in zip(found, call(*whole), strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=0.05)


# ---- joined tiles


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("joined", [1, 2048, 10_000, 2**30])
@pytest.mark.parametrize(
    "left, right, offset", [(None, 0, 0), (None, 0, 37), (40, 0, 0), (None, None, 0), (20, 200, -3)]
)
def test_joined_tiles_cover_what_tiles_cover_once(left, right, offset, joined, along):
    T, S = 700, 613
    p = Problem(left=left, right=right, q_offset=offset, chunk_size=(32, 32), joined=joined)
    shapes = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, T, 1, 1, 8), (1, S, 1, 8), (1, S, 1, 8))
    )
    operands = Operands(*shapes)
    seen = {True: np.zeros((T, S), int), False: np.zeros((T, S), int)}
    largest = 0
    for (masked, t, c), starts in schedule.tile_groups(p, operands, along):
        assert masked or max(starts[:, 0]) + t <= T and max(starts[:, 1]) + c <= S
        for i, j in starts:
            seen[masked][i : i + t, j : j + c] += 1
        largest = max(largest, 0 if masked else t * c)
    wanted = {True: np.zeros((T, S), int), False: np.zeros((T, S), int)}
    for pairs, masked in zip(schedule.tiles_by_mask(p, operands), (False, True), strict=True):
        for i, j in pairs * 32:
            wanted[masked][i : i + 32, j : j + 32] += 1
    np.testing.assert_array_equal(seen[True] + seen[False], wanted[True] + wanted[False])
    assert np.all(seen[False] <= wanted[False])  # a few whole ones may go with the masked
    assert largest <= max(joined, 32 * 32)
