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
# # One sequence over many devices
#
# A sequence that is too long for one device can be sharded over several. Each device has a part of
# the queries, keys and values, and `memeff.dot_product_attention` gives the numbers of one device.
# This notebook draws which tokens each device has and what it computes. It compares results,
# gradients and a training run with one device.
#
# It runs on any machine, because JAX can show one CPU as eight devices. The first cell asks for
# them before JAX starts, and for fast compiling, because that is most of the work here. It also
# installs memeff if it is missing, from the checkout around the notebook if there is one. The last
# two cells need that checkout, because `models/` is in it.

# %%
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",  # compiles faster, runs slower
    ]
)
if importlib.util.find_spec("memeff") is None:
    here = Path.cwd()
    folders = (here, *here.parents)
    checkout = next((f for f in folders if (f / "memeff" / "attention.py").exists()), None)
    package = f"{checkout or 'memeff'}[notebooks]"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)
sys.path.append(str(Path.cwd().parent))  # models/ lies there in a checkout

# %matplotlib inline
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from matplotlib.patches import Patch

import memeff
from memeff import bench

SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
print(f"jax {jax.__version__}, {len(jax.devices())} devices of kind {jax.devices()[0].device_kind}")

# %% [markdown]
# **Which tokens a device has.** There are three layouts. A contiguous one cuts the sequence into as
# many pieces as there are devices. A zigzag gives each device one chunk from the front and one from
# the back. A striped one deals out single tokens. `memeff.sequence_positions` says it in numbers.

# %%
DEVICES = 4 if SHORT else 8
LAYOUTS = ("contiguous", "zigzag", "striped")
COLORS = plt.get_cmap("tab10")
tokens = 4 * DEVICES


def draw_owners(panel, layout):
    positions = memeff.sequence_positions(tokens, DEVICES, layout).reshape(DEVICES, -1)
    for device, owned in enumerate(positions):
        panel.bar(owned, 1, width=0.96, color=COLORS(device), label=f"device {device}")
    panel.set(title=layout, yticks=[], xlim=(-0.6, tokens - 0.4), xticks=range(0, tokens, 4))


drawing, panels = plt.subplots(3, 1, figsize=(10, 3.6), sharex=True, layout="constrained")
for panel, layout in zip(panels, LAYOUTS, strict=True):
    draw_owners(panel, layout)
panels[-1].set_xlabel("token")
handles, labels = panels[0].get_legend_handles_labels()
drawing.legend(handles, labels, loc="outside right center")
plt.show()

# %% [markdown]
# **How much work that is.** In causal order the query at position `i` sees `i + 1` keys, so late
# tokens take more work. The slowest device determines the time, because all others wait for it. A
# dashed line is the mean.

# %%
length = 1024
drawing, panels = plt.subplots(1, 3, figsize=(10, 2.8), sharey=True, layout="constrained")
for panel, layout in zip(panels, LAYOUTS, strict=True):
    positions = memeff.sequence_positions(length, DEVICES, layout).reshape(DEVICES, -1)
    pairs = (positions + 1).sum(axis=1)
    share = pairs / pairs.mean()
    panel.bar(range(DEVICES), share, color=COLORS(range(DEVICES)))
    panel.axhline(1, color="black", linestyle="--", linewidth=1)
    panel.set(title=f"{layout}: at most {share.max():.3f}", xlabel="device")
    if layout == "zigzag":
        assert (pairs == pairs[0]).all()
panels[0].set_ylabel("causal work, mean = 1")
plt.show()

# %% [markdown]
# **One call.** `"seq"` is the name of the mesh axis that the tokens are sharded along.
# `memeff.to_zigzag` reorders them once; everything else is the call of one device with three more
# arguments. The result is compared with that of one device.

# %%
B, T, N, K, H = 1, 512, 8, 4, 32
devices_of_mesh = jax.devices()[:DEVICES]
mesh = jax.make_mesh((DEVICES,), ("seq",), axis_types=(AxisType.Auto,), devices=devices_of_mesh)
sharded = NamedSharding(mesh, PartitionSpec(None, "seq"))
keys = jax.random.split(jax.random.key(0), 8)
shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H)]
arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False)]
q, k, v = jax.device_put(memeff.to_zigzag(arrays, DEVICES), sharded)


def attend(q, k, v):
    return memeff.dot_product_attention(
        q, k, v, is_causal=True, sequence_axis="seq", sequence_layout="zigzag"
    )


def attend_on_one(q, k, v):
    return memeff.dot_product_attention(q, k, v, is_causal=True)


def check(name, result, expected, bound=2e-6):
    error = float(abs(np.asarray(result) - np.asarray(expected)).max() / abs(expected).max())
    assert error <= bound, f"{name}: {error:.2g}"
    print(f"{name:30s} differs by {error:.0e} of the largest number")


with jax.set_mesh(mesh):
    out = jax.jit(attend)(q, k, v)
expected = attend_on_one(*arrays)
check("out", memeff.from_zigzag(out, DEVICES), expected)
assert out.sharding.is_equivalent_to(q.sharding, out.ndim)
print(f"out has shape {out.shape}, and {out.sharding.shard_shape(out.shape)} on each device")

# %% [markdown]
# **Gradients** have the sharding of their operands. Those of keys and values are sums over the
# queries of all devices, and memeff sends them to the device of the keys.

# %%
cotangent = jax.random.normal(keys[3], (B, T, N, H))
cotangent_in_zigzag = jax.device_put(memeff.to_zigzag(cotangent, DEVICES), sharded)


def pull_back(attention, arrays, cotangent):
    _, pull = jax.vjp(attention, *arrays)
    return pull(cotangent)


pull_back = jax.jit(pull_back, static_argnums=0)
with jax.set_mesh(mesh):
    gradients = pull_back(attend, (q, k, v), cotangent_in_zigzag)
expected = pull_back(attend_on_one, arrays, cotangent)
for name, operand, gradient, x in zip("qkv", (q, k, v), gradients, expected, strict=True):
    assert gradient.sharding.is_equivalent_to(operand.sharding, gradient.ndim)
    check(f"d{name}, sharded as {name}", memeff.from_zigzag(gradient, DEVICES), x)

# %% [markdown]
# **The steps of a ring.** Keys and values go from device to device. At step `s` device `r` has
# those of device `r - s`, and works on them while the next ones travel. Here four devices have
# eight chunks of the sequence. A square is a chunk of queries (down) with a chunk of keys (across),
# in the colour of the device that computes it. In a paler square, causal order hides some pairs. A contiguous layout
# leaves more devices idle at each step. In a zigzag every device has three squares at first, and
# two at each later step.

# %%
RING = 4
chunks = 2 * RING
drawing, panels = plt.subplots(2, RING, figsize=(10, 5.4), layout="constrained")
for row, layout in zip(panels, ("contiguous", "zigzag"), strict=True):
    owned = memeff.sequence_positions(chunks, RING, layout).reshape(RING, 2)
    visits = np.zeros((chunks, chunks), int)
    for step, panel in enumerate(row):
        squares = np.ones((chunks, chunks, 4))  # white
        work = np.zeros(RING, int)
        for device in range(RING):
            for query_chunk in owned[device]:
                for key_chunk in owned[device - step]:
                    if key_chunk > query_chunk:
                        continue  # later keys are hidden
                    opacity = 0.45 if key_chunk == query_chunk else 1
                    squares[query_chunk, key_chunk] = COLORS(device, opacity)
                    visits[query_chunk, key_chunk] += 1
                    work[device] += 1
        panel.imshow(squares)
        panel.set_xticks(np.arange(chunks + 1) - 0.5, [])
        panel.set_yticks(np.arange(chunks + 1) - 0.5, [])
        panel.grid(color="lightgray", linewidth=0.6)
        panel.tick_params(length=0)
        panel.set_title(f"step {step}: {(work > 0).sum()} of {RING} work", fontsize=10)
        panel.set_xlabel(f"squares: {', '.join(map(str, work))}", fontsize=9)
        if layout == "zigzag" and step > 0:
            assert (work == 2).all()
    assert (visits == np.tri(chunks)).all()  # each causal pair once
    row[0].set_ylabel(layout)
patches = [Patch(color=COLORS(device), label=f"device {device}") for device in range(RING)]
drawing.legend(handles=patches, loc="outside right center")
plt.show()

# %% [markdown]
# **What memeff chooses.** There are three ways to let queries meet all keys. `memeff.explain`
# compares their times, estimated from bandwidths that were measured between two H200s, and computes
# nothing. With many tokens the ring is fastest, because its messages travel while the devices
# compute.

# %%
for tokens_of_call in (2**13, 2**20):
    x = jax.ShapeDtypeStruct((1, tokens_of_call, 16, 128), jnp.bfloat16)
    with jax.set_mesh(mesh):
        reasons = memeff.explain(
            x, x, x, is_causal=True, sequence_axis="seq", sequence_layout="zigzag"
        )
    print(f"{bench.tokens(tokens_of_call)} tokens:\n{reasons}\n")

# %% [markdown]
# **Memory of a device**, as XLA reports it: forward and gradient of a fixed sequence over more and
# more devices. Nothing is allocated to find it. One device makes the plain call.

# %%
fixed = 1024 if SHORT else 8192
counts = (1, 2) if SHORT else (1, 2, 4, 8)


def compiled_memory(devices, strategy):
    """Return the bytes on a device: of arguments and outputs, and temporary."""
    chosen = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Auto,), devices=chosen)
    options = {}
    if devices > 1:
        options = dict(sequence_axis="seq", sequence_layout="zigzag", context_parallel=strategy)

    def loss(q, k, v):
        return memeff.dot_product_attention(q, k, v, is_causal=True, **options).sum()

    spec = NamedSharding(mesh, PartitionSpec(None, "seq"))
    x = jax.ShapeDtypeStruct((1, fixed, 8, 64), jnp.float32, sharding=spec)
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
    memory = compiled.memory_analysis()
    given = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return given, memory.temp_size_in_bytes


alone = compiled_memory(1, None)
memory = {}
print("strategy   devices  arguments + gradients  temporary")
for strategy in ("all_to_all", "ring"):
    memory[strategy] = [alone]
    memory[strategy] += [compiled_memory(count, strategy) for count in counts[1:]]
    for count, (given, temporary) in zip(counts, memory[strategy], strict=True):
        print(f"{strategy:10s} {count:7d} {bench.human(given):>23s} {bench.human(temporary):>10s}")
        assert abs(given * count / alone[0] - 1) < 0.01

# %% [markdown]
# **The same as a picture.** Arguments and gradients fall as one over the number of devices. What
# `"all_to_all"` holds beside them falls, too, from two devices on. (One device needs no copies to
# send and receive.) What a ring holds beside them falls more slowly at first: from three devices on,
# each of its messages carries keys and also gradients of keys.

# %%
drawing, panels = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
for panel, (strategy, rows) in zip(panels, memory.items(), strict=True):
    given, temporary = np.array(rows).T / 2**20
    names = [str(count) for count in counts]
    panel.bar(names, given, label="arguments and gradients")
    panel.bar(names, temporary, bottom=given, label="temporary")
    panel.set(title=f'"{strategy}"', xlabel="devices")
panels[0].set_ylabel("MiB on a device")
panels[0].legend()
plt.show()

# %% [markdown]
# **Merging by hand.** Devices merge their results for parts of the keys. `memeff.merge` is that
# step. Here four sequences share a prompt, whose keys exist once. All their queries meet the prompt
# in one call, and each sequence its own keys in another.

# %%
sequences, own, shared = 4, 64, 256
query, key, value = jax.random.normal(keys[4], (3, sequences, own, 4, 32))
prompt_key, prompt_value = jax.random.normal(keys[5], (2, 1, shared, 4, 32))


def in_two_parts(query, key, value, prompt_key, prompt_value):
    together = query.reshape(1, sequences * own, 4, 32)
    out, lse = memeff.dot_product_attention(
        together, prompt_key, prompt_value, return_residual=True
    )
    of_prompt = out.reshape(query.shape), lse.reshape(query.shape[:3])
    of_own = memeff.dot_product_attention(
        query, key, value, is_causal=True, return_residual=True
    )
    return memeff.merge(of_prompt, of_own)[0]


def in_one_call(query, key, value, prompt_key, prompt_value):
    """Copy the prompt into each sequence."""
    copies = (sequences, 1, 1, 1)
    keys = jnp.concatenate([jnp.tile(prompt_key, copies), key], axis=1)
    values = jnp.concatenate([jnp.tile(prompt_value, copies), value], axis=1)
    return memeff.dot_product_attention(query, keys, values, is_causal=True, q_offset=shared)


parts = query, key, value, prompt_key, prompt_value
check("out of two merged parts", in_two_parts(*parts), in_one_call(*parts))
weights = jax.random.normal(keys[6], query.shape)
found = pull_back(in_two_parts, parts, weights)[3]
check("gradient of the prompt's keys", found, pull_back(in_one_call, parts, weights)[3])

# %% [markdown]
# **Is it right?** `memeff.audit` runs a sharded call unchanged. On each device it computes sampled
# rows and columns again in float64.

# %%
sequence = dict(is_causal=True, sequence_axis="seq", sequence_layout="zigzag")
with jax.set_mesh(mesh):
    report = memeff.audit(None, q, k, v, samples=32, **sequence)
print(report)
assert report.ok

# %% [markdown]
# **It also says which device is wrong.** Here an error of one in a hundred is planted in what
# device 2 returns. The line of `out` names it. Gradients of keys and values are wrong on all
# devices, because the queries of device 2 see keys of all of them.


# %%
def wrong_on_device_2(q, k, v, **options):
    out = memeff.dot_product_attention(q, k, v, **options)
    tokens_of_device = T // DEVICES
    device = jnp.arange(T) // tokens_of_device
    return out * jnp.where(device == 2, 1.01, 1)[:, None, None]


with jax.set_mesh(mesh):
    report = memeff.audit(wrong_on_device_2, q, k, v, samples=32, **sequence)
print(report)
of_out = next(finding for finding in report.findings if finding.name == "out")
assert [error > report.limit for error in of_out.device_errors] == [n == 2 for n in range(DEVICES)]

# %% [markdown]
# **Training.** The language model of `models/` learns the source of memeff, ten steps on one device
# and ten on four that share each row in zigzag. All but attention treats each token by itself, so
# the rest of the model is the same. Only the order of the rows' tokens differs.

# %%
STEPS = 10
small = dict(layers=2, width=32, heads=4, kv_heads=2, feed_forward=48, context=256, batch=2)
learning = dict(steps=STEPS, warmup=2, text=(str(Path(memeff.__file__).parent),))


def losses(**devices):
    """Return the loss of each step."""
    from flax import nnx

    from models import train
    from models.devices import lay_out, on_devices, replicate

    settings = train.Settings(**small, **learning, **devices)
    task = train.open_task(settings)
    curve = []
    with on_devices(settings):
        model = train.Transformer(settings, rngs=nnx.Rngs(settings.seed))
        graphdef, params = nnx.split(model, nnx.Param)
        optimiser_state = train.make_optimiser(settings).init(params)
        state = replicate(settings, (params, optimiser_state))
        for step in range(STEPS):
            rows = lay_out(settings, task.train_batch(settings.seed, step))
            state, metrics = train.train_step(settings, graphdef, state, rows)
            curve.append(float(metrics["loss"]))
    return np.array(curve)


one = losses(devices=1)
four = losses(devices=4, layout="zigzag")
difference = abs(four - one).max()
print(f"one device:   {one[0]:.4f} to {one[-1]:.4f} nats per byte")
print(f"four devices: {four[0]:.4f} to {four[-1]:.4f}; the largest difference is {difference:.0e}")
assert difference <= 1e-5 * one.min()

# %% [markdown]
# **Both curves**: one lies on the other.

# %%
plt.figure(figsize=(6, 3))
plt.plot(range(1, STEPS + 1), one, "o-", markersize=9, label="one device")
plt.plot(range(1, STEPS + 1), four, "x--", label="four devices, zigzag")
plt.gca().set(xlabel="step", ylabel="loss, nats per byte")
plt.grid(alpha=0.3)
plt.legend()
plt.show()
