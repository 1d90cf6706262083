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
# compiles both, and whatever else is installed, for up to a million tokens, looks at what the compiler sets aside, redoes
# the table of the paper that started it, takes the time of what fits, and shows what an H200 did at up to 262,144 tokens.
#
# Compiling allocates nothing, so a laptop can tell what a call would need that no machine could run. The first cell installs
# memeff where it is missing, from the checkout that the notebook lies in if there is one.

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
# The machine, and what is installed on it beside memeff and `jax.nn`: all that follows is about this machine.

# %%
SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
ON_GPU = jax.default_backend() == "gpu"
dtype = "bfloat16" if ON_GPU else "float32"
names = [name for name in bench.STANDARD if bench.why_not(name, dtype) is None]
print(bench.machine())
print("compared:", ", ".join(names))

# %% [markdown]
# **One call by hand**: causal attention with 8 heads at 16,384 tokens. The logits alone are `N T S` numbers of 4 bytes; the
# compiler sets aside room for them twice in a forward pass of plain attention, once as logits and once as probabilities,
# and memeff has no array of that size.

# %%
case = bench.Case(length=1024 if SHORT else 16384)
logits = 4 * case.heads * case.length**2
for name in ("jax.nn", "memeff"):
    need = bench.temp_bytes(name, case)
    print(f"{name:8s} {bench.human(need):>9s} beyond inputs and output: {need / logits:.4f} times the logits")

# %% [markdown]
# **Up to a million tokens**, forward and forward + gradient (`jax.vjp` with a random cotangent). Where a `~` stands, the
# growth up to there is continued, since XLA cannot compile a softmax that large.

# %%
lengths = [512, 1024] if SHORT else [2**n for n in range(10, 21, 2)]
cases = [bench.Case(0, mode=mode) for mode in bench.MODES]
compiled_names = ["jax.nn", *(name for name in names if name.startswith(("memeff", "tokamax")))]
rows = bench.memory_table(lengths, cases, compiled_names)
print(bench.memory_markdown(rows))

# %% [markdown]
# **The same as a picture**, on logarithmic axes, where a power law is a straight line: plain attention rises four times for
# every doubling, memeff two times, side by side with the inputs themselves.

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
# **The longest sequence that fits** in a given memory, inputs and outputs counted too, for forward + gradient: by the last
# line of the table and the slope. At least 16 times longer inputs, from 16 GiB on.

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
# attention ran out of memory, its ratio continues its standard column by the square law. memeff saves at least as much, as a
# ratio, at every length beyond a tile (up to 1,024 tokens one is everything, and there is nothing to save). The bytes stand
# beside it because the standards differ: compiled for a CPU, standard attention keeps twice what it kept on the paper's TPU.

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
# **Time**, of what fits: medians of samples taken in turns. The machine may be busy with other things, so read the ratios to
# `jax.nn`, not the milliseconds. On a GPU, `peak` is the memory that was measured beyond the inputs; a CPU does not tell it.

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
# **Time against length, as a picture**: the work is quadratic for everybody, since every query meets every key.

# %%
bench.figure(speed, "seconds")

# %% [markdown]
# **On an NVIDIA H200**: time, and the peak of memory that was measured beyond the inputs, outputs included. `h200.jsonl`,
# beside this notebook, is what these commands wrote there:
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
# (`memeff`: its kernels; `memeff:xla`: its chunked path, which runs where they cannot. The second and the third ran on
# another day than the others: cards differ by some 5 %.)

# %%
written = Path("h200.jsonl")
h200 = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
print(", ".join(sorted({f"{row['device']}, jax {row['jax']}" for row in h200})) or "No h200.jsonl here.")
if h200:
    print(bench.speed_markdown(h200))

# %% [markdown]
# **The same as pictures**: the slopes of time are everybody's, and those of memory are not. A cross at the upper edge is the
# length at which one ran out of the card's 141 GB. Below them, the longest that each ran, forward + gradient.

# %%
for field in ("seconds", "peak_bytes") if h200 else ():
    display(bench.figure(h200, field))
for name in dict.fromkeys(row["implementation"] for row in h200):
    ran = [row for row in h200 if row["implementation"] == name and row["mode"] == "gradient" and row["seconds"]]
    for row in ran[-1:]:
        print(f"{name:20s} {row['length']:8,d} tokens in {row['seconds']:.3g} s and {bench.human(row['peak_bytes'])}")
