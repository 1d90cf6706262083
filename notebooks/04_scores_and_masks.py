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
# # Scores, masks and positions of your own
#
# A score or a mask is a function of one query and one key, written with `jax.numpy`. memeff maps it over each tile of
# logits and differentiates it there: no T x S array is made, and its params have exact gradients. This notebook runs all
# examples of FlexAttention, draws their masks, measures the time that skipping saves, and trains a bias.
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
import matplotlib.pyplot as plt
import numpy as np
import optax

import memeff
from memeff import Mask, Score, bench, masks, scores, transforms

# %% [markdown]
# **A score with a parameter that learns**: each head pulls its attention towards the near past with a slope of its own
# (ALiBi). `score_params` is a pytree of arrays, and its gradient is compared with that of the quadratic formula.

# %%
SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
B, N, K, H = 2, 4, 2, 16
T = 140 if SHORT else 420  # a multiple of 35, for pictures of 5 x 7 pixels
keys = jax.random.split(jax.random.key(0), 16)
query, key, value = (jax.random.normal(k, (B, T, n, H)) for k, n in zip(keys, (N, K, K), strict=False))


def near_past(score, batch, head, q_pos, k_pos, params):
    return score - jnp.exp(params["log_slope"][head]) * abs(q_pos - k_pos)


def loss(params, implementation, **how):
    how |= dict(chunk_size=(64, 128)) if implementation == "xla" else {}
    out = memeff.dot_product_attention(query, key, value, **how, **params, implementation=implementation)
    return (out * jnp.cos(jnp.arange(H))).sum() / T, out


def compared(params, **how):
    """out and the params' gradient, in tiles and by the formula: the largest difference of either."""
    gradient = lambda name: jax.grad(lambda p: loss(p, name, **how), has_aux=True, allow_int=True)
    both = [jax.jit(gradient(name))(params) for name in ("xla", "reference")]
    pairs = [(x, y) for x, y in zip(*map(jax.tree.leaves, both), strict=True) if x.dtype == jnp.float32]
    return max(float(abs(x - y).max()) for x, y in pairs)


slopes = {"score_params": {"log_slope": -jnp.arange(1.0, N + 1)}}
print(f"out and the slopes' gradient differ by {compared(slopes, score_fn=near_past, is_causal=True):.0e}")

# %% [markdown]
# **FlexAttention's list**: the examples of PyTorch's blog and of attention-gym, as `docs/scores-and-masks.md` writes
# them. `scores` and `masks` have the common ones; each of the others takes one line. `&`, `|` and `~` combine masks, and
# `then` chains scores. These objects contain their params, so `jax.grad` differentiates with respect to the object
# itself.

# %%
normal = lambda n, *shape: jax.random.normal(keys[n], shape)
ids = jnp.stack([jnp.arange(T) // (T // 4), jnp.arange(T) // (T // 7)])  # documents
place = jnp.stack([jnp.arange(T) % (T // 4), jnp.arange(T) % (T // 7)])  # of a token in its own
prefix_of = jnp.where(ids % 3 == 0, 0, -1 - ids)
spans = jnp.where(place < 20, ids, -1)  # images that begin each document
slope, cap = scores.alibi_slopes(N), jnp.float32(2.0)
graph = dict(far=normal(4, N, 6), distance=jax.random.randint(keys[5], (B, T, T), 0, 6))
half = T // 2

SCORES = {
    "no-op": Score(lambda s, b, h, i, j, p: s),
    "relative bias": Score(lambda s, b, h, i, j, p: s + (i - j)),
    "relative bias, table": scores.relative(normal(6, N, 2 * 9 + 1)),
    "T5's bias": scores.t5(normal(7, 32, N)),
    "ALiBi": scores.alibi(slope),
    "soft cap": scores.soft_cap(cap),
    "soft cap, then ALiBi": scores.soft_cap(cap).then(scores.alibi(slope)),
    "latent attention's rotary part": Score(
        lambda s, b, h, i, j, p: s + p[0][b, h, i] @ p[1][b, j], (normal(8, B, N, T, 4), normal(9, B, T, 4))
    ),
    "Sandwich": Score(lambda s, b, h, i, j, p: s + jnp.cos((i - j) * p).sum() * 6 / (8 * (h + 1)), abs(normal(10, 4))),
    "Graphormer": Score(lambda s, b, h, i, j, p: s + p["far"][h, p["distance"][b, i, j]], graph),
}
MASKS = {
    "causal": masks.causal(),
    "anti-causal": masks.sliding_window(0, None),
    "sliding window": masks.sliding_window(T // 6),
    "dilated window": masks.sliding_window(T // 3) & masks.dilated(3),
    "window and strides": masks.sliding_window(T // 20) | (masks.causal() & masks.dilated(T // 10)),
    "Longformer": masks.sliding_window(T // 12, T // 12) | masks.prefix(T // 20) | Mask(lambda b, h, i, j, p: i < T // 20),
    "prefix LM": masks.causal() | masks.prefix(jnp.array([T // 3, T // 2])),
    "documents": masks.documents(ids),
    "prefix LM in documents": masks.documents(ids) & (masks.causal() | Mask(lambda b, h, i, j, p: p[b, j] < 9, place)),
    "answers to a shared prompt": masks.documents(ids) & masks.causal() | masks.documents(prefix_of, ids),
    "chunks (Llama 4)": masks.causal() & Mask(lambda b, h, i, j, p: i // 50 == j // 50),
    "frames": masks.block_causal(T // 6),
    "block diffusion": Mask(
        lambda b, h, i, j, p: (i // half == j // half) & (i % half // 30 == j % half // 30)
        | (j >= half) & (j % half // 30 < i % half // 30)
    ),
    "a window for each head": Mask(lambda b, h, i, j, p: abs(i - j) <= p[h], jnp.array([5, 20, 50, 120])),
    "NATTEN, 5 pixels a row": Mask(
        lambda b, h, i, j, p: (abs(jnp.clip(i // 5, 1, T // 5 - 2) - j // 5) < 2) & (abs(jnp.clip(i % 5, 1, 3) - j % 5) < 2)
    ),
    "text to its last image": masks.documents(ids - 1, ids),
    "images inside text": masks.causal() | Mask(lambda b, h, i, j, p: (p[b, i] >= 0) & (p[b, i] == p[b, j]), spans),
}
if SHORT:
    SCORES, MASKS = (dict(list(x.items())[::4]) for x in (SCORES, MASKS))
print(f"{'example':34s} learns    differs from the formula by")
for name, given in SCORES.items():
    learns = any(x.dtype == jnp.float32 for x in jax.tree.leaves(given))
    print(f"{name:34s} {'yes' if learns else '':9s} {compared({'score_fn': given}, is_causal=True):.0e}")
for name, given in MASKS.items():
    print(f"{name:34s} {'':9s} {compared({}, mask_fn=given):.0e}")
print(f"{'causal documents with ALiBi':34s} {'yes':9s} ", end="")
print(f"{compared({'score_fn': scores.alibi(slope)}, mask_fn=masks.documents(ids) & masks.causal()):.0e}")

# %% [markdown]
# **What masks hide**: `memeff.block_mask` finds hidden tiles once, before anything runs. `dot_product_attention` then
# visits no tile in which all pairs are hidden, and applies no mask to tiles in which all are visible. In dark blocks all
# pairs are visible, in pale ones some (in any batch entry or head). White ones are never visited.

# %%
blocks = {name: memeff.block_mask(mask, T, batch=B, heads=N, block_size=T // 35) for name, mask in MASKS.items()}
figure, panels = plt.subplots(3, 6, figsize=(13, 7.2), layout="constrained")
for panel, (name, block) in zip(panels.flat, blocks.items(), strict=False):
    block.plot(panel)
    panel.set(title=f"{name}\n{100 * block.sparsity:.0f} % hidden", xlabel="", ylabel="", xticks=[], yticks=[])
    panel.title.set_fontsize(9)
for panel in panels.flat[len(blocks) :]:
    panel.axis("off")
plt.show()

# %% [markdown]
# The same as text, for a terminal: in a block `#` all pairs are visible, in `+` some, in `.` none.

# %%
print(memeff.block_mask(masks.sliding_window(T // 20) | (masks.causal() & masks.dilated(T // 10)), T, block_size=T // 20))

# %% [markdown]
# **What skipping gains**: the time of forward and gradient with a window, for more and more tokens. The window is a
# function, a block mask, or an array for plain attention. With the block mask the time grows linearly.

# %%
lengths = [512, 1024] if SHORT else [1024, 2048, 4096, 8192]
x = {n: jax.random.normal(jax.random.key(n), (1, n, 4, 64)) for n in lengths}
near = masks.sliding_window(255)


def array_of(n):
    return {"mask": (jnp.arange(n)[:, None] - 255 <= jnp.arange(n)) & jnp.tri(n, dtype=bool)}


WAYS = {
    "memeff, function": (memeff.dot_product_attention, lambda n: {"mask_fn": near}),
    "memeff, block mask": (memeff.dot_product_attention, lambda n: {"mask_fn": memeff.block_mask(near, n)}),
    "jax.nn, array": (jax.nn.dot_product_attention, lambda n: {"mask": array_of(n)["mask"][None, None]}),
}
took = {name: [] for name in WAYS}
for n in lengths:
    runs = {}
    for name, (attend, how) in WAYS.items():
        given = how(n)
        loss_of = lambda *a, attend=attend, given=given: (attend(*a, **given) ** 2).sum()
        pull = jax.jit(jax.grad(loss_of, (0, 1, 2)))
        runs[name] = bench.Run(lambda pull=pull, n=n: pull(x[n], x[n], x[n]), jax.block_until_ready)
    for name, seconds in bench.measure(runs, rounds=1 if SHORT else 3, at_least=0.05).items():
        took[name].append(float(np.median(seconds)))
for name, seconds in took.items():
    plt.plot(lengths, seconds, "o-", label=name)
plt.xscale("log", base=2)
plt.gca().set(yscale="log", xlabel="tokens", title="seconds, forward and gradient, a window of 256 tokens")
plt.gca().xaxis.set_major_formatter(lambda n, _: bench.tokens(int(n)))
plt.grid(alpha=0.3)
plt.legend()
plt.show()
gain = took["jax.nn, array"][-1] / took["memeff, block mask"][-1]
print(f"at {lengths[-1]} tokens the block mask is {gain:.1f} times as fast as the array")

# %% [markdown]
# **What a bias costs as a function**: T5's bias is a table of 32 numbers for each head, but as an array it is N x T x S,
# and so is the array's gradient. The cell shows the temporary memory of forward and gradient, with respect to the table, as XLA
# reports it; nothing is allocated.

# %%
shape = lambda n: jax.ShapeDtypeStruct((1, n, 8, 64), jnp.float32)
table = jax.ShapeDtypeStruct((32, 8), jnp.float32)
everybody = jnp.arange(8)


def by_function(q, k, v, table):
    return memeff.dot_product_attention(q, k, v, is_causal=True, score_fn=scores.t5(table))


def by_array(q, k, v, table):
    own, at = scores.t5(table), jnp.arange(q.shape[1])
    one = lambda h, i, j: own.fn(jnp.float32(0), 0, h, i, j, own.params)
    bias = jax.vmap(jax.vmap(jax.vmap(one, (None, None, 0)), (None, 0, None)), (0, None, None))(everybody, at, at)
    return jax.nn.dot_product_attention(q, k, v, bias[None], is_causal=True)


lengths = [1024, 2048] if SHORT else [1024, 4096, 16384, 65536]
for attend, label in ((by_function, "memeff, score_fn"), (by_array, "jax.nn, bias")):
    pull = jax.jit(jax.grad(lambda *a, attend=attend: attend(*a).sum(), (0, 1, 2, 3)))
    temp = [pull.lower(*[shape(n)] * 3, table).compile().memory_analysis().temp_size_in_bytes for n in lengths]
    print(f"{label:18s}", *(f"{bench.tokens(n)}: {bench.human(size)}  " for n, size in zip(lengths, temp, strict=True)))
    plt.plot(lengths, temp, "o-", label=label)
plt.xscale("log", base=2)
plt.yscale("log", base=2)
plt.gca().set(xlabel="tokens", title="temporary memory, forward and gradient, T5's bias")
plt.gca().xaxis.set_major_formatter(lambda n, _: bench.tokens(int(n)))
plt.gca().yaxis.set_major_formatter(lambda n, _: bench.human(n))
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# **A bias that is learned**: the task is to copy the token of seven places ago. Queries and keys are zeros, so attention
# has only the positions. A T5-like table of relative positions must learn the distance, and does.

# %%
steps, reach = (60, 12) if SHORT else (400, 12)
tokens = jax.random.normal(keys[12], (8, 128, 1, 4))
zeros = jnp.zeros_like(tokens)


@jax.jit
def step(table, state):
    def miss(table):
        out = memeff.dot_product_attention(zeros, zeros, tokens, is_causal=True, score_fn=scores.relative(table))
        return ((out - jnp.roll(tokens, 7, axis=1))[:, 7:] ** 2).mean()

    value, gradient = jax.value_and_grad(miss)(table)
    updates, state = optimiser.update(gradient, state)
    return optax.apply_updates(table, updates), state, value


optimiser = optax.adam(0.1)
learned = jnp.zeros((1, 2 * reach + 1))
state, curve = optimiser.init(learned), []
for _ in range(steps):
    learned, state, missed = step(learned, state)
    curve.append(float(missed))
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.plot(curve)
left.set(xlabel="step", ylabel="mean squared miss", yscale="log")
right.bar(range(-reach, reach + 1), learned[0])
right.set(xlabel="key's position less the query's", title="the table")
plt.show()
print(f"the miss fell from {curve[0]:.2f} to {curve[-1]:.4f}; the largest entry is at {int(learned[0].argmax()) - reach}")

# %% [markdown]
# **Positions in the tile**: with `qk_transform`, rotary embeddings and the normalisation of queries and keys are computed
# for each tile, and again in the backward, so no rotated copy is stored. The cell compares this with stored copies.

# %%
transform = transforms.rms_norm(jnp.ones(H), jnp.full(H, 1.5)).then(transforms.rotary())
in_tiles = memeff.dot_product_attention(query, key, value, is_causal=True, qk_transform=transform)
row = lambda which: jax.vmap(lambda x, at: transform.fn(x, at, which, transform.params), (0, 0))
heads = lambda which: jax.vmap(jax.vmap(lambda x: row(which)(x, jnp.arange(T)), 1, 1))
stored = memeff.dot_product_attention(heads("query")(query), heads("key")(key), value, is_causal=True)
print(f"differ by {float(abs(in_tiles - stored).max()):.0e}")

# %% [markdown]
# **What attention does**: entropy, largest logit and mean distance of each row come from the pass that computes out, and
# `memeff.key_mass` is the sum of the probabilities that each key receives. A key that all queries look at is a peak of
# the mass.

# %%
alike, loud = query + 1, key.at[:, T // 3].set(1.5)  # what all queries have in common, one key has, too
found = memeff.attention_statistics(alike, loud, value)
mass = memeff.key_mass(alike, loud)
titles = {"entropy of a row, nats": found.entropy, "mean distance, tokens": found.mean_distance, "what a key receives": mass}
figure, panels = plt.subplots(1, 3, figsize=(13, 3), layout="constrained")
for panel, (title, x) in zip(panels, titles.items(), strict=True):
    panel.plot(x[0])
    panel.set(title=title, xlabel="position")
    panel.legend([f"head {n}" for n in range(N)], fontsize=7)
plt.show()
print(f"key {int(mass[0, :, 0].argmax())} of head 0 receives the most, {float(mass[0, :, 0].max()):.0f} of {T}")

# %% [markdown]
# **Is it right?** `memeff.audit` runs any attention, of memeff or others, and computes sampled rows and columns again in
# float64, in linear memory. Here it finds a defect that was planted.


# %%
def forgets_the_last_key(q, k, v, **how):
    return memeff.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.full(B, T - 1), **how)


print(memeff.audit(None, query, key, value, score_fn=scores.alibi(slope), samples=32))
print()
print(memeff.audit(forgets_the_last_key, query, key, value, samples=32))
