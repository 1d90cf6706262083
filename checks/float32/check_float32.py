"""float32 on a Hopper GPU: values against float64, then times, of memeff's kernels, its chunked path and jax.nn (XLA).

    python .carry/tf32/check_float32.py values          # errors beside those of TF32 (jax.nn's default precision)
    python .carry/tf32/check_float32.py times           # TFLOP/s forward, forward + gradient
    python .carry/tf32/check_float32.py tilings [H]     # times of other tilings, forward and gradient

Needs the branch's memeff on the path. jax.nn runs at JAX's default precision (TF32) unless said.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import memeff


def draw(B, T, N, H, K=None, seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 4)
    K = K or N
    shapes = (B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes)]


def memeff_call(q, k, v, causal, implementation="pallas", **kw):
    return memeff.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation, **kw)


def jax_call(q, k, v, causal, **kw):
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def exact(q, k, v, causal):  # float64
    B, T, N, H = q.shape
    G = N // k.shape[2]
    k, v = (jnp.repeat(x, G, 2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)


def with_gradient(f):
    def run(q, k, v, dout):
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(dout)

    return run


def values():
    print(jax.devices()[0].device_kind, jax.__version__)
    rows = [
        (1, 512, 4, 64, 4, False), (1, 512, 4, 64, 4, True), (2, 1000, 4, 64, 2, True), (1, 1024, 2, 128, 2, False),
        (1, 1025, 4, 128, 1, True), (2, 333, 2, 40, 2, True), (1, 4096, 2, 64, 2, True), (1, 300, 2, 128, 2, True),
    ]
    worst = 0.0
    for B, T, N, H, K, causal in rows:
        q, k, v, dout = draw(B, T, N, H, K)
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, dout)]
            with jax.default_matmul_precision("highest"):
                truth = jax.jit(with_gradient(functools.partial(exact, causal=causal)))(*wide)
            truth = [np.asarray(x) for x in truth]
        line = []
        for f in (memeff_call, functools.partial(memeff_call, implementation="xla"), jax_call):
            found = jax.jit(with_gradient(functools.partial(f, causal=causal)))(q, k, v, dout)
            line.append([np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y) for x, y in zip(found, truth)])
        worst = max(worst, max(a / b for a, b in zip(line[0], line[2])))
        print((B, T, N, H, K, causal), *("[" + " ".join(f"{e:.1e}" for e in es) + "]" for es in line), flush=True)
    print("columns: kernels, chunked, jax.nn; out dq dk dv, relative Frobenius. Largest kernels / jax.nn:", f"{worst:.3f}")
    # the same bits twice, and hidden NaN
    q, k, v, dout = draw(1, 1000, 2, 64)
    f = jax.jit(with_gradient(functools.partial(memeff_call, causal=True)))
    a, b = f(q, k, v, dout), f(q, k, v, dout)
    print("two runs equal:", all((x == y).all() for x, y in zip(a, b)))
    g = jax.jit(lambda q, k, v: memeff_call(q, k, v, False, key_value_seq_lengths=jnp.array([900])))
    dirty = g(q, k.at[:, 900:].set(jnp.nan), v.at[:, 900:].set(jnp.inf))
    print("hidden NaN changes no bit:", bool((dirty == g(q, k, v)).all()))
    # bfloat16 as before
    h = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    print("bfloat16 finite:", bool(jnp.isfinite(memeff_call(*h, True)).all()))


def seconds(f, args, repeats=5):
    f = jax.jit(f).lower(*args).compile()
    jax.block_until_ready(f(*args))
    best = []
    for _ in range(repeats):
        t = time.perf_counter()
        for _ in range(10):
            out = f(*args)
        jax.block_until_ready(out)
        best.append((time.perf_counter() - t) / 10)
    return float(np.median(best))


def tflops(f, args, causal, gradient):
    q, k, *_ = args
    B, T, N, H = q.shape
    count = 4 * B * N * T * T * H * (3.5 if gradient else 1) / (2 if causal else 1)
    try:
        t = seconds(with_gradient(functools.partial(f, causal=causal)) if gradient
                    else lambda q, k, v, _: f(q, k, v, causal), args)
    except Exception as e:
        return "failed " + str(e).splitlines()[0][:60]
    return f"{count / t / 1e12:.0f}"


def times():
    print(jax.devices()[0].device_kind, jax.__version__, "TFLOP/s, forward / forward + gradient")
    for T, H, causal in ((4096, 64, True), (4096, 64, False), (8192, 64, True), (4096, 128, True), (4096, 128, False)):
        args = draw(16384 // T, T, 2048 // H, H)
        forms = dict(kernels=memeff_call, chunked=functools.partial(memeff_call, implementation="xla"), jax_nn=jax_call)
        print(T, H, "causal" if causal else "full",
              *(f"{n} {tflops(f, args, causal, False)} / {tflops(f, args, causal, True)}" for n, f in forms.items()), flush=True)


def tilings(H=64):
    """Forward tilings (warpgroups, keys, stages, queries); dq and dk dv (warpgroups, tile, stages, items)."""
    from memeff.pallas.hopper import backward_common, calls
    from memeff.pallas.hopper.forward_memory import Tiling

    fwd = {64: [(2, 128, 2, 2), (2, 128, 2, 1), (2, 64, 4, 2), (2, 64, 5, 1), (1, 128, 2, 1)],
           128: [(2, 64, 2, 1), (1, 64, 2, 2), (1, 64, 3, 1), (1, 128, 1, 1)]}[H]
    dq = {64: [(2, 64, 3, 1), (2, 64, 2, 1), (1, 64, 4, 1), (1, 128, 2, 1)], 128: [(1, 64, 2, 1), (1, 64, 1, 1)]}[H]
    dk = {64: [(2, 64, 4, 1), (2, 64, 3, 1), (2, 64, 2, 2), (1, 64, 4, 1)], 128: [(2, 64, 1, 1), (1, 64, 2, 1)]}[H]
    args = draw(4, 4096, 2048 // H, H)
    old_forward, old_backward = calls.forward_tiling, calls.backward_tilings
    for t in fwd:
        calls.forward_tiling = lambda p, o, t=t: Tiling(*t, parts=2)
        jax.clear_caches()
        print("forward", H, t, "causal", tflops(memeff_call, args, True, False), "full", tflops(memeff_call, args, False, False), flush=True)
    calls.forward_tiling = old_forward
    for a, b in [(a, dk[0]) for a in dq] + [(dq[0], b) for b in dk[1:]]:
        calls.backward_tilings = lambda p, o, a=a, b=b: tuple(backward_common.Tiling(*x, parts=2) for x in (a, b))
        jax.clear_caches()
        print("gradient", H, a, b, "causal", tflops(memeff_call, args, True, True), "full", tflops(memeff_call, args, False, True), flush=True)
    calls.backward_tilings = old_backward


if __name__ == "__main__":
    {"values": values, "times": times, "tilings": lambda: tilings(*map(int, sys.argv[2:]))}[sys.argv[1]]()
