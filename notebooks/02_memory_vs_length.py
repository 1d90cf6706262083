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
# # Memory and time of attention against length
#
# Plain attention keeps a number for every pair of tokens; memeff computes the same result tile by tile. This notebook
# compiles both, and other implementations that are installed, for up to a million tokens, and shows the memory that the
# compiler reserves. It repeats the table of the paper that this method comes from, measures the time of the calls that
# fit, and shows results of an H200 at up to 262,144 tokens.
#
# Compiling allocates nothing, so even a laptop can tell how much memory a call would need that no machine could run. The
# first cell installs memeff if it is missing, from the checkout around the notebook if there is one.

# %%
import dataclasses
import importlib.util
import json
import math
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
import matplotlib.pyplot as plt
from IPython.display import display

from memeff import bench

# %% [markdown]
# This is the machine of all results below, with the implementations that are installed on it beside memeff and `jax.nn`.

# %%
SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
ON_GPU = jax.default_backend() == "gpu"
dtype = "bfloat16" if ON_GPU else "float32"
names = [name for name in bench.STANDARD if bench.why_not(name, dtype) is None]
print(bench.machine())
print("compared:", ", ".join(names))

# %% [markdown]
# **One call by hand**: causal attention with 8 heads at 16,384 tokens. The logits alone are `N T S` numbers of 4 bytes;
# in a forward pass of plain attention the compiler reserves memory for them twice, once as logits and once as
# probabilities. memeff has no array of that size.

# %%
case = bench.Case(length=1024 if SHORT else 16384)
logits = 4 * case.heads * case.length**2
for name in ("jax.nn", "memeff"):
    need = bench.temp_bytes(name, case)
    print(f"{name:8s} {bench.human(need):>9s} beyond inputs and output: {need / logits:.4f} times the logits")

# %% [markdown]
# **Up to a million tokens**, forward and forward + gradient (`jax.vjp` with a random cotangent). A figure with `~` is
# extrapolated, because XLA cannot compile a softmax that large.

# %%
lengths = [512, 1024] if SHORT else [2**n for n in range(10, 21, 2)]
cases = [bench.Case(0, mode=mode) for mode in bench.MODES]
compiled_names = ["jax.nn", *(name for name in names if name.startswith(("memeff", "tokamax")))]
rows = bench.memory_table(lengths, cases, compiled_names)
print(bench.memory_markdown(rows))

# %% [markdown]
# **The same as a picture**, on logarithmic axes, where a power law is a straight line: for every doubling of the length
# plain attention takes four times the memory, and memeff two times, as the inputs themselves do.

# %%
bench.figure(rows, "temp_bytes")

# %% [markdown]
# **The slope**: by how much memory grows per doubling over the longest step of the table. 2 is linear, 4 is quadratic.


# %%
def need(name, mode, length):
    same = {"implementation": name, "mode": mode, "length": length}
    return next(row["temp_bytes"] for row in rows if same.items() <= row.items())


for mode in bench.MODES:
    for name in ("jax.nn", "memeff"):
        first, last = lengths[-2:]
        growth = (need(name, mode, last) / need(name, mode, first)) ** (1 / math.log2(last / first))
        print(f"{bench.TITLES[mode]:18s} {name:8s} {growth:.2f} per doubling")
        assert SHORT or (growth < 2.15 if name == "memeff" else growth > 3.9)

# %% [markdown]
# **The longest sequence that fits** in a given memory, inputs and outputs counted too, for forward + gradient, computed
# from the last line of the table and the slope. The more memory there is, the larger is the gain.

# %%
last, mode = lengths[-1], "gradient"
arrays = 8 / 3 * next(row["input_bytes"] for row in rows if row["length"] == last)  # q, k, v, dout; out, dq, dk, dv
for gibibytes in (8, 16, 24, 80, 141):
    square, line = need("jax.nn", mode, last) / last**2, (need("memeff", mode, last) + arrays) / last
    side = arrays / last / (2 * square)  # square T^2 + (arrays / last) T = memory
    plain, tiled = (gibibytes * 2**30 / square + side**2) ** 0.5 - side, gibibytes * 2**30 / line
    print(f"{gibibytes:4d} GiB: jax.nn {plain:10,.0f} tokens, memeff {tiled:12,.0f}: {tiled / plain:4.0f} times longer")
    assert SHORT or gibibytes < 16 or tiled >= 16 * plain

# %% [markdown]
# **The paper's table.** Rabe & Staats, *Self-attention Does Not Need O(n^2) Memory* (2021, arXiv:2112.05682), tables 2 and
# 3: memory beyond inputs and outputs, one head, on one TPUv3 chip with 16 GB, standard attention as in Flax. They state 59
# and 32 times less at 16,384 tokens, from figures before rounding. Longer sequences did not fit with standard attention.

# %%
KiB, MiB, GiB = 2**10, 2**20, 2**30
paper_lengths = [2**n for n in range(8, 21, 2)]
paper = {  # standard attention (None: out of memory), theirs
    "forward": (
        [270 * KiB, 4 * MiB, 64 * MiB, 1 * GiB, None, None, None],
        [270 * KiB, 4 * MiB, 16 * MiB, 17 * MiB, 21 * MiB, 64 * MiB, 256 * MiB],
    ),
    "gradient": (
        [532 * KiB, 8 * MiB, 128 * MiB, 2 * GiB, None, None, None],
        [532 * KiB, 8 * MiB, 41 * MiB, 64 * MiB, 257 * MiB, 1 * GiB, 4 * GiB],
    ),
}

# %% [markdown]
# **Redone**: the same setting, one head of size 64, no mask, against standard attention (`jax.nn`) compiled for this
# machine, in float32 on a CPU, which has no bfloat16, and in the paper's bfloat16 on a GPU. Where the paper's standard
# attention ran out of memory, its column is extrapolated by the square of the length. memeff saves at least the
# paper's ratio at every length beyond one tile. (Up to 1,024 tokens one tile holds all logits, so there is nothing to
# save.) The table also has bytes, because standard attention differs: compiled for a CPU, it takes twice the memory that
# it took on the paper's TPU.

# %%
single = dataclasses.replace(bench.Case(0), heads=1, kv_heads=1, mask="full", dtype=dtype)
used = paper_lengths[:2] if SHORT else paper_lengths
redone = {}
for mode, (standard, theirs) in paper.items():
    print(f"\n{bench.TITLES[mode]}: times less memory than standard attention, and bytes")
    print(f"{'tokens':>9s} {'paper':>9s} {'memeff':>9s}   {'paper':>9s} {'memeff':>9s} {'standard':>9s}")
    for n, length in enumerate(used):
        one = bench.memory_table([length], [dataclasses.replace(single, mode=mode)])
        plain, own = (row["temp_bytes"] for row in one)
        was = standard[n] or standard[3] * (length // paper_lengths[3]) ** 2
        redone[mode, length] = was / theirs[n], plain / own
        told = " ".join(f"{bench.human(x):>9s}" for x in (theirs[n], own, plain))
        print(f"{length:9,d} {was / theirs[n]:9,.1f} {plain / own:9,.1f}   {told}")
        assert length < 512 or round(plain / own, 1) >= round(was / theirs[n], 1)

# %% [markdown]
# **The same as a picture**: how many times less memory, the paper and memeff.

# %%
drawing, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
for panel, mode in zip(panels, paper, strict=True):
    ratios = [redone[mode, length] for length in used]
    for name, values in zip(("Rabe & Staats 2021", "memeff"), zip(*ratios, strict=True), strict=True):
        panel.loglog(used, values, marker="o", label=name)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda x, _: bench.tokens(int(x)))
    panel.set(title=bench.TITLES[mode], xlabel="tokens")
    panel.grid(alpha=0.3)
panels[0].set_ylabel("times less memory than standard attention")
panels[0].legend()
plt.show()

# %% [markdown]
# **Time** of the calls that fit: medians of samples taken in turns. The machine may be busy with other work, so read the
# ratios to `jax.nn` and not the milliseconds. On a GPU, `peak` is the memory that was measured beyond the inputs; a CPU
# does not report it.

# %%
if SHORT:
    timed = [bench.Case(256, heads=2, kv_heads=2)]
else:
    sizes = dict(heads=16, kv_heads=16, head_dim=128) if ON_GPU else dict(heads=4, kv_heads=4)
    steps = range(11, 19) if ON_GPU else range(9, 13)
    timed = [bench.Case(2**n, mode=mode, dtype=dtype, **sizes) for n in steps for mode in bench.MODES]
speed = list(bench.speed_table(timed, names, rounds=1 if SHORT else 5))
print(bench.speed_markdown(speed))
assert all(row["note"] is None for row in speed if row["implementation"] == "memeff")

# %% [markdown]
# **Time against length, as a picture**: the work is quadratic for all implementations, because every query meets every
# key.

# %%
bench.figure(speed, "seconds")

# %% [markdown]
# **On an NVIDIA H200**: time, and the peak of memory that was measured beyond the inputs, outputs included. These
# commands wrote `h200.jsonl`, which is beside this notebook:
#
# ```
# alias bench="python -m memeff.bench --dtype bfloat16 --head-dim 128 --mask causal --json h200.jsonl"
# bench --length 4k 16k 32k 64k        --rounds 3 --implementation jax.nn
# bench --length 4k 16k 64k 128k 256k  --rounds 2 --implementation memeff jax.nn:cudnn
# bench --length 4k 16k 64k 128k 256k  --rounds 2 --implementation memeff:xla
# bench --length 4k 16k 64k 128k 256k  --rounds 2 --implementation tokamax:mosaic
# bench --length 4k 16k 64k 256k       --rounds 1 --implementation tokamax:xla_chunked
# ```
#
# `memeff` are its kernels, and `memeff:xla` is its chunked path, which runs where they cannot. The second and the third
# command ran on another day than the others; cards differ by some 5 %.

# %%
written = Path("h200.jsonl")
h200 = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
print(", ".join(sorted({f"{row['device']}, jax {row['jax']}" for row in h200})) or "No h200.jsonl here.")
if h200:
    print(bench.speed_markdown(h200))

# %% [markdown]
# **The same as pictures**: time has the same slope for all implementations, and memory has not. A cross at the upper edge
# is the length at which an implementation ran out of the card's 141 GB. The lines below the pictures say how long a
# sequence each one ran, forward + gradient.

# %%
for field in ("seconds", "peak_bytes") if h200 else ():
    display(bench.figure(h200, field))
for name in dict.fromkeys(row["implementation"] for row in h200):
    ran = [row for row in h200 if row["implementation"] == name and row["mode"] == "gradient" and row["seconds"]]
    for row in ran[-1:]:
        print(f"{name:20s} {row['length']:8,d} tokens in {row['seconds']:.3g} s and {bench.human(row['peak_bytes'])}")
