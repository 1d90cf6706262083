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
# # Every derivative of attention in linear memory
#
# A gradient is one derivative of many. Generative models are trained through a `jax.jvp` of the network, curvature needs
# products with the Hessian, score matching the gradient of a jvp. `memeff.dot_product_attention` has all of them, exact
# and without a T x S array. This notebook compares them with the quadratic formula, measures their memory, and trains a
# small one-step generator with a gradient of a jvp.
#
# The first cell installs memeff if it is missing, from the checkout around the notebook if there is one.

# %%
import functools
import importlib.util
import os
import subprocess
import sys
import time
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
import optax.contrib

import memeff
from memeff import bench

# %% [markdown]
# **A derivative along a direction**: `jax.jvp` gives out and its tangent in one forward pass. Here are 300 tokens in 4
# query heads and 2 key heads, causal, in tiles of 64 x 128, beside `implementation="reference"`, which computes the
# formula with every pair of tokens at once.

# %%
SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
T, N, K, H = 300, 4, 2, 16
keys = jax.random.split(jax.random.key(0), 6)
shapes = [(1, T, N, H), (1, T, K, H), (1, T, K, H)]
arrays, along = ([jax.random.normal(k, shape) for k, shape in zip(keys[i : i + 3], shapes, strict=True)] for i in (0, 3))
tiled = functools.partial(memeff.dot_product_attention, is_causal=True, chunk_size=(64, 128))
quadratic = functools.partial(memeff.dot_product_attention, is_causal=True, implementation="reference")


def check(name, found, expected, tolerance=2e-5):
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    error = max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
    assert error <= tolerance, f"{name}: {error:.2g}"
    print(f"{name:58s} agrees to {error:.0e} of the largest")


jvp = jax.jit(lambda attend: jax.jvp(attend, arrays, along), static_argnums=0)
check("out and its tangent", jvp(tiled), jvp(quadratic))

# %% [markdown]
# **The second order, three ways**: the product of the Hessian with a direction, as the jvp of a gradient and as the
# gradient of a gradient, and the gradient of a jvp, which score matching asks for. One function computes all of them for
# any attention.


# %%
def derivatives(attend):
    loss = lambda x: jnp.square(attend(*x)).mean()
    gradient = jax.grad(loss)
    dot = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))
    return {
        "gradient": lambda x, along: gradient(x),
        "jvp": lambda x, along: jax.jvp(lambda x: attend(*x), (x,), (along,)),
        "jvp of gradient": lambda x, along: jax.jvp(gradient, (x,), (along,))[1],
        "gradient of gradient": lambda x, along: jax.grad(lambda x: dot(gradient(x), along))(x),
        "gradient of jvp": lambda x, along: jax.grad(lambda x: jax.jvp(loss, (x,), (along,))[1])(x),
    }


second = list(derivatives(tiled))[2:]
found, expected = ([jax.jit(derivatives(x)[name])(arrays, along) for name in second] for x in (tiled, quadratic))
for name, one, other in zip(second, found, expected, strict=True):
    check(name, one, other)
check("the three with one another", found[1:], found[:1] * 2)

# %% [markdown]
# **Their memory**: the bytes that the compiled call needs beyond its inputs and outputs; nothing is allocated to find
# them. Four heads of size 32, causal, float32. For eight times the tokens quadratic attention needs 64 times the memory,
# whatever the derivative, and memeff at most about 8 times.

# %%
lengths = [256] if SHORT else [512, 4096, 32768]
kinds = ["gradient", "jvp", "jvp of gradient", "gradient of gradient"]
attentions = {
    name: functools.partial(memeff.dot_product_attention, is_causal=True, implementation=which)
    for name, which in (("memeff", None), ("quadratic", "reference"))
}


def temporary(function, *inputs):
    return jax.jit(function).lower(*inputs).compile().memory_analysis().temp_size_in_bytes


used, table = {}, []
for length in lengths:
    inputs = [jax.ShapeDtypeStruct((1, length, 4, 32), jnp.float32)] * 3
    for kind in kinds:
        one = [temporary(derivatives(attend)[kind], inputs, inputs) for attend in attentions.values()]
        used[kind, length] = one
        table.append([bench.tokens(length), kind, *map(bench.human, one), f"{one[1] / one[0]:,.1f}"])
print(bench.markdown(["tokens", "derivative", *attentions, "times less"], table))
for kind in kinds if not SHORT else ():
    own, plain = (used[kind, lengths[-1]][n] / used[kind, lengths[-2]][n] for n in (0, 1))
    assert own < 8.8 and plain > 60

# %% [markdown]
# **The same as a picture**, on logarithmic axes: the quadratic lines are twice as steep as those of memeff, which rise
# only once the arrays are larger than a tile.

# %%
drawing, panel = plt.subplots(figsize=(8, 4.5), layout="constrained")
for color, kind in enumerate(kinds):
    for name, style, one in zip(attentions, ("o-", "o--"), zip(*(used[kind, n] for n in lengths), strict=True), strict=True):
        panel.plot(lengths, one, style, color=f"C{color}", label=f"{kind}, {name}")
panel.set_xscale("log", base=2)
panel.set_yscale("log", base=2)
panel.xaxis.set_major_formatter(lambda x, _: bench.tokens(int(x)))
panel.yaxis.set_major_formatter(lambda y, _: bench.human(y))
panel.set(xlabel="tokens", ylabel="temporary memory")
panel.grid(alpha=0.3)
panel.legend(fontsize="small")
plt.show()

# %% [markdown]
# **Something to learn**: MeanFlow (Geng et al. 2025, arXiv:2505.13447) turns noise into a sample in one step. The data are
# sequences of 128 points. Each point is a token, and the points of a sequence draw one petal of a flower, whose angle is
# random. One noisy point says little about that angle, but the mean of all points does, so the network must attend to the
# others. It is a transformer of two layers, in plain functions. It gets each point's place in the sequence, and the times
# `r` and `t`.

# %%
POINTS, WIDTH, HEADS, LAYERS, BATCH = 128, 48, 4, 2, 16
waves = lambda x, n: jnp.concatenate([f(x[..., None] * jnp.arange(1, n + 1)) for f in (jnp.sin, jnp.cos)], -1)
norm = lambda x: x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
place = lambda length: 2 * jnp.pi * jnp.arange(length) / length


def petals(angle):  # [B] -> B T 2
    x, y = 1.3 + 0.7 * jnp.cos(place(POINTS)), 0.35 * jnp.sin(place(POINTS))
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    return jnp.stack([cos * x - sin * y, sin * x + cos * y], -1)


def initial(key):
    keys = iter(jax.random.split(key, 5 + 5 * LAYERS))
    matrix = lambda rows, cols, scale=1.0: scale * rows**-0.5 * jax.random.normal(next(keys), (rows, cols))
    layer = lambda: {
        "modulate": matrix(WIDTH, 2 * WIDTH, 0.1),
        "qkv": matrix(WIDTH, 3 * WIDTH),
        "out": matrix(WIDTH, WIDTH, 0.5),
        "up": matrix(WIDTH, 2 * WIDTH),
        "down": matrix(2 * WIDTH, WIDTH, 0.5),
    }
    ends = {"point": matrix(2, WIDTH), "place": matrix(16, WIDTH), "time": matrix(8, WIDTH)}
    ends |= {"head": matrix(WIDTH, 2, 0.1), "skip": matrix(WIDTH, 1, 0.1)}
    return ends | {"layers": [layer() for _ in range(LAYERS)]}


def average_velocity(params, z, r, t, implementation=None):  # B T 2, [B], [B] -> B T 2
    B, T, _ = z.shape
    when = jax.nn.silu(waves(jnp.stack([t, t - r], -1) * jnp.pi / 2, 2).reshape(B, 8) @ params["time"])[:, None]  # B 1 W
    x = z @ params["point"] + waves(place(T), 8) @ params["place"] + when
    for layer in params["layers"]:
        before_attention, before_mlp = jnp.split(1 + when @ layer["modulate"], 2, -1)
        heads = (norm(x) * before_attention @ layer["qkv"]).reshape(B, T, 3 * HEADS, -1)
        q, k, v = jnp.split(heads, 3, 2)
        out = memeff.dot_product_attention(q, k, v, implementation=implementation)
        x = x + out.reshape(B, T, WIDTH) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) * before_mlp @ layer["up"]) @ layer["down"]
    return norm(x) @ params["head"] + when @ params["skip"] * z


# %% [markdown]
# **The loss.** On the way `z = (1 - t) x + t e` from data to noise the velocity is `v = e - x`. The network gives its
# average `u(z, r, t)` from `r` to `t`, whose derivative along the way ties it to `v`:
#
# $$u = v - (t - r)\, \frac{du}{dt} \qquad \frac{du}{dt} = v\, \partial_z u + \partial_t u$$
#
# So `du/dt` is one `jax.jvp` through the transformer, along `(v, 0, 1)`. The right side is held fixed, half of each batch
# has `r = t`, and large errors weigh less, all as in the paper. The gradient goes through the jvp's first result.


# %%
def meanflow_loss(params, x, key, implementation=None):
    half, (of_noise, of_times) = len(x) // 2, jax.random.split(key)
    e = jax.random.normal(of_noise, x.shape)
    r, t = jnp.sort(jax.random.uniform(of_times, (2, len(x))), 0)
    r = r.at[:half].set(t[:half])
    wide = lambda time: time[:, None, None]
    z, v = (1 - wide(t)) * x + wide(t) * e, e - x
    u = functools.partial(average_velocity, params, implementation=implementation)
    now, change = jax.jvp(u, (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
    target = jax.lax.stop_gradient(v - wide(t - r) * change)
    error = jnp.square(now - target).mean((1, 2))
    weight = jax.lax.stop_gradient(1 / (error + 0.01))
    return (weight * error).mean(), (error[:half].mean(), error[half:].mean())


STEPS = 3 if SHORT else 700
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.contrib.muon(optax.warmup_cosine_decay_schedule(0, 0.04, STEPS // 10, STEPS)),
)


def train_step(params, state, key):
    of_data, of_loss = jax.random.split(key)
    x = petals(jax.random.uniform(of_data, (BATCH,), maxval=2 * jnp.pi))
    (_, errors), gradients = jax.value_and_grad(meanflow_loss, has_aux=True)(params, x, of_loss)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, errors


# %% [markdown]
# **Training**, under a minute on two cores. Where `r = t` the error is that of plain flow matching and falls to what
# the noise leaves open; where `r < t` the target contains the network's own derivative and is noisier, and need not fall.

# %%
params = initial(jax.random.key(0))
state = optimizer.init(params)
step = jax.jit(train_step)
start, errors = time.perf_counter(), []
for n in range(STEPS):
    params, state, error = step(params, state, jax.random.fold_in(jax.random.key(1), n))
    errors.append(error)
errors = np.array(errors)
print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters, {STEPS} steps in {time.perf_counter() - start:.0f} s")
window = min(25, STEPS)
smooth = np.stack([np.convolve(x, np.ones(window) / window, "valid") for x in errors.T])
print(f"squared error where r = t: {smooth[0, 0]:.2f} at first, {smooth[0, -1]:.2f} at last")
assert SHORT or smooth[0, -1] < 0.4 * smooth[0, 0]
plt.figure(figsize=(7, 3.5), layout="constrained")
for x, label in zip(smooth, ("r = t: flow matching", "r < t: through du/dt"), strict=True):
    plt.semilogy(np.arange(len(x)) + window, x, label=label)
plt.xlabel("step")
plt.ylabel(f"squared error, mean of {window} steps")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# **One step from noise to data**: `x = e - u(e, 0, 1)`. Every colour is one sequence. The distance is the root mean
# square distance of its points to the petal at the angle of the sequence's mean. Sequences of pure noise are far from any
# petal.


# %%
def distance(x):
    middle = x.mean(1)
    nearest = petals(jnp.arctan2(middle[:, 1], middle[:, 0]))
    return float(jnp.sqrt(jnp.square(x - nearest).sum(-1).mean(-1)).mean())


e = jax.random.normal(jax.random.key(7), (12, POINTS, 2))
data = petals(jax.random.uniform(jax.random.key(8), (12,), maxval=2 * jnp.pi))
made = e - average_velocity(params, e, jnp.zeros(12), jnp.ones(12))
drawing, panels = plt.subplots(1, 3, figsize=(11, 3.9), sharex=True, sharey=True, layout="constrained")
for panel, (name, xs) in zip(panels, {"noise": e, "one step": made, "data": data}.items(), strict=True):
    for n, x in enumerate(np.asarray(xs)):
        panel.plot(*x.T, ".", color=plt.get_cmap("hsv")(n / 12), markersize=3)
    panel.set(title=f"{name}: {distance(xs):.2f} from a petal", aspect="equal", xlim=(-3, 3), ylim=(-3, 3))
plt.show()
assert SHORT or distance(made) < 0.25 * distance(e)

# %% [markdown]
# **The memory of such a training step for longer sequences**, two in a batch. The cell compiles the gradient of the loss
# and does not run it. Each of the two layers has a jvp and a gradient of it. The optimizer would add arrays as large as
# the parameters.

# %%
length, one = 256 if SHORT else 8192, {}
for name, which in (("memeff", None), ("quadratic", "reference")):
    gradient = jax.grad(functools.partial(meanflow_loss, implementation=which), has_aux=True)
    one[name] = temporary(gradient, params, jax.ShapeDtypeStruct((2, length, 2), jnp.float32), jax.random.key(0))
told = ", ".join(f"{name} {bench.human(x)}" for name, x in one.items())
print(f"{length:,} points: {told}: {one['quadratic'] / one['memeff']:.1f} times less")

# %% [markdown]
# **A score that learns**: `score_fn` changes each logit as a function of its positions, and its params have derivatives
# of every order too. Here the params are the slopes of ALiBi. The cell computes the Hessian of a loss with respect to
# them: a jvp of a gradient for each slope, all under one `vmap`.

# %%
slopes = memeff.scores.alibi_slopes(N)


def loss(slopes, attend):
    out = attend(*arrays, score_fn=memeff.scores.alibi(slopes))
    return jnp.square(out.sum(2)).mean()  # heads together, so that their slopes meet


hessian, expected = (jax.jit(jax.hessian(loss), static_argnums=1)(slopes, attend) for attend in (tiled, quadratic))
check("Hessian of the slopes", hessian, expected)
print(np.array2string(np.asarray(hessian), precision=2, suppress_small=True, floatmode="fixed"))

# %% [markdown]
# **Entropy as a penalty**: `memeff.attention_statistics` gives out, and each row's entropy in nats, largest logit and
# mean distance, in one pass. All of them are differentiable like out itself. Here gradient descent on the queries alone
# brings the entropy of every row to about 2 nats: it then looks at about `exp(2)`, some 7, keys.


# %%
def penalty(query):
    return jnp.square(memeff.attention_statistics(query, *arrays[1:]).entropy - 2).mean()


query, values = arrays[0], []
descend = jax.jit(jax.value_and_grad(penalty))
for n in range(61):
    value, slope = descend(query)
    values.append(value)
    if n % 20 == 0:
        print(f"step {n:2d}: mean squared distance from 2 nats {value:.4f}")
    query = query - 1000 * slope
assert values[-1] < 0.1 * values[0]

# %% [markdown]
# **A mask as a function**: `block_mask` finds once which tiles a mask hides, and every derivative skips them. This mask
# is a window of 256 tokens back, and the first 128 tokens are visible to all.

# %%
mask = memeff.block_mask(
    memeff.masks.causal() & (memeff.masks.sliding_window(256) | memeff.masks.prefix(128)), 1024, block_size=64
)
print(mask)
wide = [jax.random.normal(key, (1, 1024, 2, 8)) for key in keys]
masked = functools.partial(memeff.dot_product_attention, mask_fn=mask)
jvp = jax.jit(lambda attend: jax.jvp(attend, wide[:3], wide[3:]), static_argnums=0)
check("out and its tangent under the mask", jvp(masked), jvp(functools.partial(masked, implementation="reference")))
