# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How attention fits in memory that grows with the sequence
#
# Attention is taught with a matrix of T x S probabilities. This notebook computes the same numbers and the same gradients
# from small tiles of that matrix, none of which is kept. It compares every step with the whole matrix.
#
# | letter | meaning | | letter | meaning |
# |---|---|---|---|---|
# | `T`, `S` | number of queries, of keys | | `s` | logits: scaled dot products |
# | `H`, `D` | size of a query or key, of a value | | `m`, `l` | a row's largest logit, its sum of `exp(s - m)` |
# | `t`, `c` | rows and columns of one tile | | `lse` | `m + log(l)`: log-sum-exp of a row |
# | `i`, `j` | index of query tile, of key tile | | `p` | probabilities `exp(s - lse)` |
#
# The first cell installs memeff if it is missing, from the checkout around the notebook if there is one.

# %%
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

if importlib.util.find_spec("memeff") is None:
    here = Path.cwd()
    checkout = next((f for f in (here, *here.parents) if (f / "memeff" / "attention.py").exists()), None)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", f"{checkout or 'memeff'}[notebooks]"], check=True)

# %matplotlib inline
import jax
import jax.numpy as jnp
import numpy as np

import memeff
from memeff import bench

# %% [markdown]
# The derivation uses one head, NumPy and float64, so that "equal" can mean equal to 12 digits. All sizes are different, so
# that a confusion of two letters does not go unnoticed.

# %%
SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
rng = np.random.default_rng(0)
T, S, H, D = 37, 53, 5, 11
q, k, v = rng.standard_normal((T, H)), rng.standard_normal((S, H)), rng.standard_normal((S, D))
scale = H**-0.5


def check(name, found, expected, tolerance=1e-12):
    difference = np.abs(found - expected).max()
    assert difference <= tolerance, f"{name}: {difference:.2g}"
    print(f"{name:44s} agrees to {difference:.0e}")


# %% [markdown]
# **The definition**: `out = softmax(scale q k') v`. It holds T x S numbers, and its gradient holds them again: at a million
# tokens a single head would need 4 TiB for one float32 copy.

# %%
s = scale * q @ k.T  # T S
p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
out = p @ v  # T D
print(f"q, k, v: {q.size + k.size + v.size} numbers; s: {s.size}; in float32 at T = S = 2^20: {4 * 2**40 / 2**40:.0f} TiB")

# %% [markdown]
# **A row of softmax does not change when a number is subtracted from its logits.** Subtract the largest logit `m`, and
# nothing overflows. A row's sum is then known by two numbers, `m` and `l`, or by one, `lse = m + log(l)`: `p = exp(s -
# lse)`.

# %%
m = s.max(-1)
l = np.exp(s - m[:, None]).sum(-1)
lse = m + np.log(l)
check("p from lse", np.exp(s - lse[:, None]), p)

# %% [markdown]
# **Two parts of the keys, each with its own `m`, `l` and `o = sum exp(s - m) v`, merge into the whole**: multiply each by
# `exp(m_part - m)`, where `m` is the larger of the two, add, and divide by `l` at the very end.


# %%
def part(s, v):
    m = s.max(-1)
    e = np.exp(s - m[:, None])
    return m, e.sum(-1), e @ v


def merge(one, other):
    (m1, l1, o1), (m2, l2, o2) = one, other
    m = np.maximum(m1, m2)
    a1, a2 = np.exp(m1 - m), np.exp(m2 - m)
    return m, a1 * l1 + a2 * l2, a1[:, None] * o1 + a2[:, None] * o2


m, l, o = merge(part(s[:, :20], v[:20]), part(s[:, 20:], v[20:]))
check("out of two merged parts", o / l[:, None], out)
check("their lse", m + np.log(l), lse)

# %% [markdown]
# **The online softmax** (Milakov & Gimelshein 2018, arXiv:1805.02867) merges one chunk of keys after the other into a
# running `m`, `l` and `o`. Only one chunk of `s` exists at a time. It starts with `m = -inf`. The first factor is then
# `exp(-inf) = 0`, so the first step needs no special case.

# %%
m, l, o = np.full(T, -np.inf), np.zeros(T), np.zeros((T, D))
for j in range(0, S, 16):  # the last chunk is shorter: 53 = 3 * 16 + 5
    s_j = scale * q @ k[j : j + 16].T  # (1) (2)
    m_new = np.maximum(m, s_j.max(-1))  # (3)
    a = np.exp(m - m_new)
    e = np.exp(s_j - m_new[:, None])
    l = a * l + e.sum(-1)  # (4)
    o = a[:, None] * o + e @ v[j : j + 16]
    m = m_new
check("out, key chunk after key chunk", o / l[:, None], out)

# %% [markdown]
# **Chunks of queries as well** (Rabe & Staats 2021, arXiv:2112.05682) leave a tile of `t x c` logits, whatever T and S are.
# A mask is a rule on positions, `visible(rows, cols)`, so it needs no T x S array either. A row that sees no key gets
# `out = 0` and `lse = -inf`. This is memeff's forward pass. `memeff/chunked/forward.py` has the same steps under the
# same numbers.


# %%
def forward(q, k, v, t, c, visible):
    out, lse = np.zeros((len(q), v.shape[1])), np.full(len(q), -np.inf)
    for i in range(0, len(q), t):
        rows = np.arange(i, min(i + t, len(q)))
        m, l, o = np.full(len(rows), -np.inf), np.zeros(len(rows)), np.zeros((len(rows), v.shape[1]))
        for j in range(0, len(k), c):
            cols = np.arange(j, min(j + c, len(k)))
            s = np.where(visible(rows[:, None], cols), scale * q[rows] @ k[cols].T, -np.inf)  # (1) (2)
            m_new = np.maximum(m, s.max(-1))  # (3)
            shift = np.where(m_new == -np.inf, 0, m_new)  # -inf - -inf is not a number
            a, e = np.exp(m - shift), np.exp(s - shift[:, None])
            m, l, o = m_new, a * l + e.sum(-1), a[:, None] * o + e @ v[cols]  # (4)
        some = l > 0
        out[rows[some]], lse[rows[some]] = o[some] / l[some, None], m[some] + np.log(l[some])
    return out, lse


everything = lambda rows, cols: (rows >= 0) & (cols >= 0)
for t, c in [(1, 1), (7, 13), (16, 64), (T, S)]:
    check(f"out in tiles of {t} x {c}", forward(q, k, v, t, c, everything)[0], out)

# %% [markdown]
# **With a mask**, the tiles still give the numbers of the quadratic formula, and rows that see no key give 0. The mask here
# is causal, and the first three queries stand before every key.

# %%
causal = lambda rows, cols: cols <= rows - 3
out, lse = forward(q, k, v, 7, 13, causal)
s_masked = np.where(causal(np.arange(T)[:, None], np.arange(S)), scale * q @ k.T, -np.inf)
with np.errstate(divide="ignore"):
    exact_lse = np.log(np.exp(s_masked).sum(-1))
p = np.where(exact_lse[:, None] > -np.inf, np.exp(s_masked - np.where(exact_lse > -np.inf, exact_lse, 0)[:, None]), 0)
check("causal out in tiles", out, p @ v)
check("causal lse in tiles", lse[3:], exact_lse[3:])
assert (out[:3] == 0).all() and (lse[:3] == -np.inf).all()

# %% [markdown]
# **The gradient, with the matrix.** Given `dout`, the chain rule through `out = p v`, through softmax and through
# `s = scale q k'` gives, with `dp` the cotangent of `p` and so on:
#
# $$dv = p^\top dout \qquad dp = dout\, v^\top \qquad ds = p \circ (dp - \mathrm{rowsum}(p \circ dp))$$
#
# $$dq = scale\; ds\, k \qquad dk = scale\; ds^\top q$$
#
# The next cell compares them with a small step in a random direction.

# %%
dout = rng.standard_normal((T, D))
dp = dout @ v.T
ds = p * (dp - (p * dp).sum(-1, keepdims=True))
dq, dk, dv = scale * ds @ k, scale * ds.T @ q, p.T @ dout

direction = [rng.standard_normal(x.shape) for x in (q, k, v)]
loss = lambda e: (dout * forward(q + e * direction[0], k + e * direction[1], v + e * direction[2], T, S, causal)[0]).sum()
slope = sum((g * d).sum() for g, d in zip((dq, dk, dv), direction, strict=True))
check("slope by the formulas and by a small step", slope, (loss(1e-6) - loss(-1e-6)) / 2e-6, 1e-6)

# %% [markdown]
# **`rowsum(p dp)` is the one term that seems to need a whole row of `p`. It does not**: insert `dp = dout v'`,
#
# $$\sum_s p_{ts} \sum_d dout_{td}\, v_{sd} = \sum_d dout_{td} \sum_s p_{ts} v_{sd} = \sum_d dout_{td}\, out_{td} = delta_t$$
#
# which needs only `out`. So a backward pass can compute any tile of `p` again from `lse`, and its `ds` from `delta`.

# %%
delta = (dout * out).sum(-1)
check("delta = rowsum(dout * out) = rowsum(p * dp)", delta, (p * dp).sum(-1))

# %% [markdown]
# **The gradient in tiles**: the forward pass keeps `out` and one number a row, `lse`; every tile adds its share to `dq`,
# `dk`, `dv` and is dropped (Dao 2023, arXiv:2307.08691, algorithm 2). If `lse` itself is used in a loss, with cotangent
# `dlse`, then `d lse / d s = p` adds `p dlse` to `ds`: it is enough to subtract `dlse` from `delta`.


# %%
def backward(q, k, v, out, lse, dout, dlse, t, c, visible):
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    delta = (dout * out).sum(-1) - dlse
    lse = np.where(lse > -np.inf, lse, 0)  # rows that see nothing: their s is -inf, their p is 0
    for i in range(0, len(q), t):
        rows = np.arange(i, min(i + t, len(q)))
        for j in range(0, len(k), c):
            cols = np.arange(j, min(j + c, len(k)))
            s = np.where(visible(rows[:, None], cols), scale * q[rows] @ k[cols].T, -np.inf)
            p = np.exp(s - lse[rows, None])  # (5)
            dv[cols] += p.T @ dout[rows]
            ds = p * (dout[rows] @ v[cols].T - delta[rows, None])  # (6)
            dq[rows] += scale * ds @ k[cols]  # (7)
            dk[cols] += scale * ds.T @ q[rows]
    return dq, dk, dv


found = backward(q, k, v, out, lse, dout, np.zeros(T), 7, 13, causal)
for name, x, exact in zip(("dq", "dk", "dv"), found, (dq, dk, dv), strict=True):
    check(f"{name} in tiles", x, exact)
dlse = rng.standard_normal(T)
dq_lse = backward(q, k, v, out, lse, 0 * dout, dlse, 7, 13, causal)[0]
check("dq of a loss on lse", dq_lse, scale * (p * dlse[:, None]) @ k)

# %% [markdown]
# **memeff is this algorithm in JAX**, with batches, grouped heads, biases and windows, compiled for the device at hand.
# Its arrays are `[B, T, N, H]`, and its default precision is float32. JAX calls memeff's own rule for the gradient.

# %%
arrays = [jnp.asarray(x, jnp.float32)[None, :, None] for x in (q, k, v)]  # B T N H with B = N = 1
attend = lambda q, k, v: memeff.dot_product_attention(q, k, v, is_causal=True, q_offset=-3, chunk_size=(7, 13))
result, pull = jax.vjp(attend, *arrays)
gradients = pull(jnp.asarray(dout, jnp.float32)[None, :, None])
for name, x, exact in zip(("out", "dq", "dk", "dv"), (result, *gradients), (out, dq, dk, dv), strict=True):
    check(f"memeff's {name}, float32", np.asarray(x)[0, :, 0], exact, 1e-5)

# %% [markdown]
# **Who sees whom, drawn by memeff itself**: with the identity as `value`, `out` is the matrix `p`, so `#` marks where a
# query (row) puts weight on a key (column).


# %%
def draw(T, S, **options):
    zeros = jnp.zeros((1, T, 1, 2)), jnp.zeros((1, S, 1, 2))
    weights = np.asarray(memeff.dot_product_attention(*zeros, jnp.eye(S)[None, :, None], **options))[0, :, 0]
    return [" ".join("#" if weight > 0 else "." for weight in row) for row in weights]


pictures = {
    "causal": draw(4, 5, is_causal=True),
    "q_offset=1": draw(4, 5, is_causal=True, q_offset=1),
    "window (1, 0)": draw(4, 5, local_window_size=(1, 0)),
    "segments 0 0 1 1": draw(4, 4, query_segment_ids=jnp.array([[0, 0, 1, 1]])),
}
print("   ".join(f"{name:16s}" for name in pictures))
for lines in zip(*pictures.values(), strict=True):
    print("   ".join(f"{line:16s}" for line in lines))
assert pictures["causal"] == ["# . . . .", "# # . . .", "# # # . .", "# # # # ."]

# %% [markdown]
# **What it saves**: the bytes that the compiled call needs beyond its inputs and outputs, for forward + gradient of 8 heads
# of size 64. Twice the tokens cost plain attention four times the memory, and memeff at most twice.
# `02_memory_vs_length` goes on from here, to a million tokens.

# %%
lengths = [1024] if SHORT else [2**n for n in range(10, 17)]
rows = bench.memory_table(lengths, [bench.Case(0, mode="gradient")])
print(bench.memory_markdown(rows))
bench.figure(rows, "temp_bytes")
