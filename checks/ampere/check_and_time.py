"""Check memeff's Ampere kernels on a GPU (Hopper, too) against float64, and time them.

    PYTHONPATH=. python3 .carry/ampere/check_and_time.py [--tiles] [--only REGEX]

Prints errors first (relative Frobenius norm; bf16 should be 2e-3 to 4e-3, lse below 1e-5), then
TFLOP/s of forward and forward + gradient: Ampere kernels, memeff's own choice (on Hopper its Hopper
kernels), jax.nn (cudnn), torch FlashAttention-2. --tiles tries other tiles of the forward.
"""
import argparse, functools, re, subprocess, sys, time
import contextlib
import numpy as np

ap = argparse.ArgumentParser()
ap.add_argument("--tiles", action="store_true"); ap.add_argument("--torch", action="store_true")
ap.add_argument("--only", default=""); A = ap.parse_args()
SHAPES = [(2, 8192, 16, 128, False), (2, 8192, 16, 128, True), (2, 8192, 32, 64, False), (2, 8192, 32, 64, True)]


def flops(B, T, N, H, causal, mode):
    return 4 * B * N * T * T * H * (0.5 if causal else 1) * (3.5 if mode == "f+b" else 1)


def torch_main():
    import torch, torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for B, T, N, H, causal in SHAPES:
        q, k, v, do = (torch.randn(B, T, N, H, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        for x in (q, k, v): x.requires_grad_()
        def call(): return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        def fwd():
            with torch.no_grad(): return call()
        def both(): return torch.autograd.grad(call(), (q, k, v), do)
        for mode, f in (("fwd", fwd), ("f+b", both)):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                for _ in range(3): f()
                torch.cuda.synchronize(); t = time.perf_counter()
                for _ in range(20): f()
                torch.cuda.synchronize(); s = (time.perf_counter() - t) / 20
            print(f"{H} {'causal' if causal else 'full':7} {mode} torch FlashAttention-2 {flops(B,T,N,H,causal,mode)/s/1e12:7.1f} TFLOP/s", flush=True)


if A.torch:
    torch_main(); sys.exit()

import jax, jax.numpy as jnp
import memeff
from memeff.pallas.ampere import calls, capability, forward
print(jax.__version__, jax.devices(), memeff.__file__, flush=True)
ampere = functools.partial(memeff.dot_product_attention, implementation="pallas")


def truth(q, k, v, causal, left):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    G = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, G, 2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    i, j = np.ogrid[:s.shape[2], :s.shape[3]]
    keep = np.ones(s.shape[2:], bool)
    if causal: keep &= j <= i
    if left is not None: keep &= i - left <= j
    s = np.where(keep, s, -np.inf); m = s.max(-1, keepdims=True); p = np.exp(s - m); l = p.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnd->btnd", p / l, v), (np.log(l) + m)[..., 0].swapaxes(1, 2)


def check():
    cases = [(1, 200, 210, 2, 1, 64, False, None), (2, 1000, 1000, 4, 4, 128, True, None), (1, 777, 777, 2, 2, 40, True, 100),
             (1, 2048, 1500, 4, 2, 128, False, None), (1, 1025, 1025, 2, 2, 64, True, 300), (1, 64, 4096, 2, 2, 128, False, None)]
    for B, T, S, N, K, H, causal, left in cases:
        q, k, v = (jax.random.normal(jax.random.key(n), s, jnp.bfloat16) for n, s in enumerate(((B, T, N, H), (B, S, K, H), (B, S, K, H))))
        window = dict(local_window_size=(left, 0)) if left is not None else {}
        call = jax.jit(functools.partial(ampere, is_causal=causal, return_residual=True, **window))
        with capability.chosen(): out, lse = call(q, k, v)
        again = call(q, k, v)
        o, L = truth(q, k, v, causal, left)
        error = np.linalg.norm(np.asarray(out, np.float64) - o) / np.linalg.norm(o)
        print("values", (B, T, S, N, K, H, causal, left), f"out {error:.2e} lse {np.abs(np.asarray(lse) - L).max():.2e}",
              "same bits twice", bool((out == again[0]).all()), "ok" if error < 4e-3 else "WRONG", flush=True)
    # NaN that nobody sees changes no bit
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 512, 2, 128), jnp.bfloat16) for n in range(3))
    call = jax.jit(functools.partial(ampere, is_causal=True, key_value_seq_lengths=jnp.array([300])))
    with capability.chosen():
        x, y = call(q, k, v), call(q, k.at[:, 300:].set(jnp.nan), v.at[:, 300:].set(jnp.nan))
    print("hidden NaN changes no bit", bool((x == y).all()), flush=True)


def seconds(f, *args):
    g = jax.jit(lambda n, *args: jax.lax.fori_loop(0, n, lambda i, x: f(x, *args[1:]), args[0]))
    jax.block_until_ready(g(2, *args)); n = 30
    t = time.perf_counter(); jax.block_until_ready(g(n, *args)); return (time.perf_counter() - t) / n


def time_all(impls):
    for B, T, N, H, causal in SHAPES:
        if not re.search(A.only, f"{H} {causal}"): continue
        q, k, v, do = (jax.random.normal(jax.random.key(n), (B, T, N, H), jnp.bfloat16) for n in range(4))
        for name, call, context in impls:
            for mode in ("fwd", "f+b"):
                def step(q, k, v, do):  # its result has the shape of q, for a loop on the device
                    if mode == "fwd": return call(q, k, v, is_causal=causal)
                    out, pull = jax.vjp(lambda *x: call(*x, is_causal=causal), q, k, v)
                    dq, dk, dv = pull(do); return dq + dk + dv
                try:
                    with context(): s = seconds(step, q, k, v, do)
                    print(f"{H} {'causal' if causal else 'full':7} {mode} {name:24} {flops(B,T,N,H,causal,mode)/s/1e12:7.1f} TFLOP/s", flush=True)
                except Exception as e: print(H, causal, mode, name, type(e).__name__, str(e)[:200], flush=True)


check()
if A.tiles:
    original = calls.tiling_for
    for tile in ((128, 64), (64, 64), (64, 128), (128, 128)):
        calls.tiling_for = lambda width, tile=tile: forward.Tiling(*tile)
        jax.clear_caches(); print("tile", tile, flush=True)
        time_all([("ampere %d x %d" % tile, ampere, capability.chosen)])
    calls.tiling_for = original
time_all([("memeff ampere", ampere, capability.chosen),
          ("memeff's choice", memeff.dot_product_attention, contextlib.nullcontext),
          ("jax.nn cudnn", functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), contextlib.nullcontext)])
subprocess.run([sys.executable, __file__, "--torch"])
