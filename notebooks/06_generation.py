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
# # Generation: caches, pages, drafts
#
# A model that writes text computes attention from one query at a time to all keys so far. That
# takes as long as it takes to read the keys once, so they must stay in place, and nothing else
# should be read. This notebook shows `memeff.KVCache` and other caches, and measures the time of a
# token against the length of its context.
#
# It runs on any machine. The first cell installs memeff if it is missing, from the checkout around
# the notebook if there is one. The last two cells need that checkout, because `models/` is in it.

# %%
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
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

import memeff
from memeff import KVCache, PageAllocator, PagedKVCache, bench, masks

SHORT = os.environ.get("MEMEFF_NOTEBOOK_SHORT") == "1"  # the test suite's form: small sizes only
B, N, K, H = 2, 8, 2, 64  # sequences, query heads, key heads, head size
rng = np.random.default_rng(0)


def tokens(T, batch=B):
    """Return random queries, keys and values of T tokens."""
    shapes = [(batch, T, heads, H) for heads in (N, K, K)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


print(f"jax {jax.__version__} on {bench.machine()['device']}")

# %% [markdown]
# **A cache.** `append` takes the keys and values of new tokens, and `attend` attends from the newest
# tokens to all that are cached. A prompt of 20 tokens and then one token at a time give the numbers
# of one causal call.

# %%
q, k, v = tokens(24)
full = memeff.dot_product_attention(q, k, v, is_causal=True)
cache = KVCache.zeros(B, 32, K, H)
outs = []
for first, end in [(0, 20), (20, 21), (21, 22), (22, 24)]:
    cache = cache.append(k[:, first:end], v[:, first:end])
    outs.append(cache.attend(q[:, first:end]))
difference = jnp.abs(jnp.concatenate(outs, axis=1) - full).max()
print(f"{cache.lengths.tolist()} tokens cached; largest difference {difference:.1e}")
assert difference < 1e-5

# %% [markdown]
# **Prompts of different lengths** are padded and appended in one call, with `counts`. The next
# tokens of each sequence then follow its own last token. A full cache is refused, and under jit,
# where lengths are not known, it gives NaN and overwrites nothing.

# %%
q, k, v = tokens(9)
cache = KVCache.zeros(B, 10, K, H).append(k, v, counts=[9, 4])
print("cached:", cache.lengths.tolist())
one = [x[:, :1] for x in (q, k, v)]
cache = cache.append(*one[1:])
print("one more token each:", cache.lengths.tolist())
try:
    cache.append(*one[1:])
except ValueError as error:
    print(error)
outgrown = jax.jit(lambda cache: cache.append(*one[1:]))(cache)
print("under jit:", outgrown.overflowed.tolist())

# %% [markdown]
# **In place.** Donated to `jax.jit`, or carried by `jax.lax.scan`, the cache is written in place. The
# compiler says so: its outputs alias its inputs, and what it needs besides is far smaller.


# %%
def generate(cache, q, k, v):
    def step(cache, _):
        cache = cache.append(k, v)
        return cache, cache.attend(q)

    return jax.lax.scan(step, cache, length=16)


cache = KVCache.zeros(B, 16384, K, H)
program = jax.jit(generate, donate_argnums=0).lower(cache, *one).compile()
memory = program.memory_analysis()
size = sum(x.nbytes for x in jax.tree.leaves(cache))
print(f"cache            {bench.human(size):>9}")
print(f"aliased          {bench.human(memory.alias_size_in_bytes):>9}")
print(f"temporary memory {bench.human(memory.temp_size_in_bytes):>9}")
assert memory.alias_size_in_bytes == size

# %% [markdown]
# **The time of a token against the length of its context**, for one layer. `jax.nn` gets plain
# arrays of exactly that length. Both axes are logarithmic, so a straight line of slope 1 means that
# the time is that of reading the keys.

# %%
lengths = [512, 1024] if SHORT else [2**power for power in range(10, 17)]
names = ["memeff:cache", "memeff:pages64", "memeff:int8", "jax.nn"]
cases = [
    bench.Case(length, batch=B, heads=N, kv_heads=K, head_dim=H, query_length=1)
    for length in lengths
]
rows = list(bench.speed_table(cases, names, rounds=1 if SHORT else 5))
drawing, panel = plt.subplots(figsize=(7, 4), layout="constrained")
for name in names:
    times = [1e3 * row["seconds_min"] for row in rows if row["implementation"] == name]
    panel.plot(lengths, times, "o-", label=name)
panel.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel="ms for a token of each")
panel.set_title(f"{B} sequences, {N} query heads, {K} key heads of {H}, float32")
panel.set_xticks(lengths, [bench.tokens(length) for length in lengths])
panel.legend()
plt.show()
print(bench.speed_markdown(rows[-len(names) :]))

# %% [markdown]
# **Time follows the lengths, not the room.** The same cache, with room for many tokens, takes little
# time while it holds few. (On GPUs without memeff's kernel it follows the room.)

# %%
room = 2048 if SHORT else 65536
filled = [room // 8, room // 4, room // 2, room]
q, k, v = tokens(1)
keys, values = (jnp.asarray(rng.standard_normal((B, room, K, H)), jnp.float32) for _ in range(2))
attend = jax.jit(lambda cache, q: cache.attend(q))
times = []
for length in filled:
    cache = KVCache(keys, values, jnp.full((B,), length, jnp.int32))
    attend(cache, q).block_until_ready()
    samples = []
    for _ in range(2 if SHORT else 9):
        start = time.perf_counter()
        attend(cache, q).block_until_ready()
        samples.append(time.perf_counter() - start)
    times.append(1e3 * min(samples))  # other programs only make it longer
for length, milliseconds in zip(filled, times, strict=True):
    print(f"{bench.tokens(length):>5} of {bench.tokens(room)} tokens: {milliseconds:7.2f} ms")

# %% [markdown]
# **A window needs a ring.** With `window` the cache has room for the window alone, and new tokens
# replace those that no query sees any more.

# %%
q, k, v = tokens(64)
full = memeff.dot_product_attention(q, k, v, is_causal=True, local_window_size=(8, 0))
ring = KVCache.zeros(B, 9, K, H, window=8)
worst = 0.0
for t in range(64):
    new = slice(t, t + 1)
    ring = ring.append(k[:, new], v[:, new])
    worst = max(worst, float(jnp.abs(ring.attend(q[:, new]) - full[:, new]).max()))
print(f"{ring.lengths.tolist()} tokens went through {ring.capacity} slots; {worst:.1e} off")
assert worst < 1e-5

# %% [markdown]
# **Pages.** In a server, sequences come and go, and share prefixes. Their keys are in pages of one
# pool, and `memeff.PageAllocator` records which sequence owns which page. Here three samples share
# a prompt of 22 tokens. Each got a copy of the last page when it began to write, and then pages of
# its own.

# %%
page, per_sequence = 8, 6
allocator = PageAllocator(pages=16, page_size=page)
pool = PagedKVCache.zeros(16, page, K, H, batch=1, pages_per_sequence=per_sequence)
q, k, v = tokens(22, batch=1)
allocator.add("a")
allocator.extend("a", 22)
pool = pool.with_sequences(allocator.table(["a"], per_sequence), [0]).append(k, v)
names = ["a", "b", "c"]
for name in names[1:]:
    allocator.fork("a", name)
for _ in range(12):
    copies = [pair for name in names for pair in allocator.extend(name, 1)]
    if copies:
        pool = pool.copy_pages(*np.array(copies).T)
    lengths = allocator.lengths(names) - 1
    pool = pool.with_sequences(allocator.table(names, per_sequence), lengths)
    q, k, v = tokens(1, batch=3)
    pool = pool.append(k, v)
table = allocator.table(names, per_sequence)
drawing, panel = plt.subplots(figsize=(7, 2.2), layout="constrained")
owners = np.array([[allocator.owners(x) if x >= 0 else 0 for x in row] for row in table])
panel.imshow(owners, cmap="Blues", vmin=0, vmax=4, aspect="auto")
for row, column in np.ndindex(*table.shape):
    if table[row, column] >= 0:
        panel.text(column, row, f"page {table[row, column]}", ha="center", va="center")
panel.set(yticks=range(3), yticklabels=names, xlabel="page of the sequence")
panel.set_title("darker: owned by more sequences")
plt.show()
print(f"out {pool.attend(q).shape}; {allocator.free_pages} of {allocator.pages} pages are free")

# %% [markdown]
# **A tree of drafts.** A small model proposes several continuations, and one call of the large model
# checks all of them. `masks.tree` shows each draft the prompt, its ancestors, and itself. Rows are
# drafts, columns keys: 4 of the prompt, then the drafts.

# %%
parents = np.array([[-1, 0, 0, 1, 1, 2]])
T = parents.shape[1]
mask = masks.tree(masks.ancestors_of(parents), start=4)
q, k, v = tokens(4 + T, batch=1)
print(memeff.block_mask(masks.tree(masks.ancestors_of(parents)[0], 0), T, block_size=1))
cache = KVCache.zeros(1, 16, K, H).append(k, v)
out = cache.attend(q[:, 4:], mask_fn=mask)
path = [0, 2, 5]  # the last draft and its ancestors
rows_of_path = [*range(4), *(4 + draft for draft in path)]
alone = memeff.dot_product_attention(q[:, 9:10], k[:, rows_of_path], v[:, rows_of_path])
print(f"draft 5 beside its path decoded alone: {jnp.abs(out[:, 5] - alone[:, 0]).max():.1e} off")
cache = cache.keep_drafts(T, [path], [3])
print("kept:", cache.lengths.tolist(), "tokens")

# %% [markdown]
# **8 bits.** An int8 cache takes half the memory of bfloat16, with one scale for each token and head.
# The table gives |out - true| / |true| for normally distributed numbers.

# %%
q, k, v = tokens(256)
true = memeff.dot_product_attention(q, k, v, is_causal=True)
for dtype in (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn):
    wide = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    cache = KVCache.zeros(B, 256, K, H, dtype).append(k.astype(wide), v.astype(wide))
    out = cache.attend(q.astype(wide)).astype(jnp.float32)
    error = jnp.linalg.norm(out - true) / jnp.linalg.norm(true)
    size = sum(x.nbytes for x in jax.tree.leaves(cache))
    print(f"{jnp.dtype(dtype).name:>14}: {error:.4f}, {bench.human(size)}")

# %% [markdown]
# **A model.** `models.generate` reads prompts of different lengths in chunks, and then writes token
# by token. This one has random parameters, so its text means nothing, but its speed is real. The
# tokens of a prompt are the same alone and in a batch.

# %%
from flax import nnx  # noqa: E402

from models import generate as writer  # noqa: E402
from models.transformer import Config, Transformer  # noqa: E402

config = Config(layers=2, width=128, heads=4, kv_heads=2)
graphdef, params = nnx.split(Transformer(config, rngs=nnx.Rngs(0)), nnx.Param)
options = dict(length=32, temperature=0.9, top_p=0.95, seed=1)
prompts = ["def f(x):", "import", "class"]
together = [
    "".join(x) for x in zip(*writer.stream(graphdef, params, prompts, **options), strict=True)
]
alone = writer.write(graphdef, params, prompt=prompts[0], **options)
print(repr(alone))
assert alone == together[0]

# %% [markdown]
# **Tokens a second** of the whole model, against the context and for batches of 1 and 8.

# %%
contexts = [256] if SHORT else [1024, 4096, 16384]
params = writer.decoding_params(graphdef, params)
for batch in (1, 8):
    for context in contexts:
        starts = [np.zeros(context, np.int32)] * batch
        keys = jax.random.split(jax.random.key(0), batch)
        sampling = writer.Sampling(0.9)
        state = writer.read_prompts(graphdef, params, starts, 4 * writer.BLOCK)
        _, state = writer.write_block(graphdef, params, state, keys, sampling)  # compiles
        samples = []
        for _ in range(3):
            start = time.perf_counter()
            written, state = writer.write_block(graphdef, params, state, keys, sampling)
            written.block_until_ready()
            samples.append(time.perf_counter() - start)
        rate = written.size / min(samples)
        print(f"{batch} x {bench.tokens(context):>4}: {rate:7,.0f} tokens a second")
