"""Visit the logits of a vocabulary on Hopper (sm_90a), and keep of each tile what a pass needs.

A tile has 128 tokens and 256 words. A thread block takes work items: 128 tokens and a run of tiles
of words. Its producer copies 64 features of tokens and words at a time into a ring in shared
memory. Two thread blocks, a cluster, take neighbouring tokens and the same words, which they copy
for each other. Two consumer warpgroups multiply 64 tokens each:
  (1) raw += x k, for all features     (2) s = logits(raw)
and apply a pass to s while the other one multiplies, which hides most of it:
  `SumPass`          m, l, hit and total of the run, as in vocabulary/__init__.py
  `ProbabilityPass`  also p = exp(s - m) in 16 bits, with the m that held when the tile was visited
  `CotangentPass`    d_raw, from lse and the cotangents of the sums
No number is summed across thread blocks, so two runs give the same bits.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import LOG2_E
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    Barrier,
    Ref,
    accumulators,
    broadcast_vector,
    cluster_barriers,
    copy_to_cluster,
    full_tile,
    multiprocessors,
    plgpu,
    positions,
    take_registers,
    tile_ref,
    warp_specialized_kernel,
)
from memeff.pallas.hopper.persistent import ROWS, drain
from memeff.vocabulary.tile import Settings, logits

CONSUMERS = 2  # warpgroups
TOKENS = CONSUMERS * ROWS  # of a tile
WORDS = 256  # of a tile
FEATURES = 64  # of a step
PART = 64  # words of a part of a tile, which is stored at a time
STAGES = 4  # slots of the ring
UNROLLED = 2  # steps, so that one multiplies while the next one is awaited
SLOTS = 1  # parts of a tile that a consumer stores at the same time
LONGEST_RUN = 64  # tiles of words in a work item
TOGETHER = 16  # tiles of tokens whose items run at the same time, so that they share words in L2
CLUSTER = 2  # thread blocks that copy words for each other: a third less to copy from L2


class Grid(NamedTuple):
    """The work items of a call. A thread block takes one of an item's `cluster` tiles of tokens."""

    token_tiles: int  # a multiple of `cluster`; the last may be empty
    word_tiles: int
    run: int  # tiles of words in an item, at most
    cluster: int

    @property
    def runs(self) -> int:
        """Return the number of items for each tile of tokens."""
        return -(-self.word_tiles // self.run)

    @property
    def items(self) -> int:
        """Return the number of items."""
        return self.token_tiles // self.cluster * self.runs

    def item(self, index) -> tuple[Any, Any]:
        """Return the first tile of tokens and the run of an item.

        Neighbours have the same words, for TOGETHER tiles of tokens.
        """
        together = TOGETHER // self.cluster
        size = jnp.int32(together * self.runs)
        group = lax.div(index, size)
        first = group * together
        width = jnp.minimum(together, self.token_tiles // self.cluster - first)
        rest = lax.rem(index, size)
        return (first + lax.rem(rest, width)) * self.cluster, lax.div(rest, width)

    def tile(self, index) -> tuple[Any, Any]:
        """Return this thread block's tile of tokens and the run of an item."""
        first, run = self.item(index)
        return (first + lax.axis_index("in_cluster") if self.cluster > 1 else first), run


def choose_grid(tokens: int, words: int, blocks: int) -> Grid:
    """Return the grid in which `blocks` thread blocks finish first; the longest runs if many do."""
    token_tiles = -(-tokens // TOKENS)
    word_tiles = -(-words // WORDS)
    empty = -token_tiles % CLUSTER
    cluster = CLUSTER if TOGETHER * empty < token_tiles else 1
    if cluster > 1:
        token_tiles += empty
    best = None
    least = None
    for run in range(min(LONGEST_RUN, word_tiles), 0, -1):
        grid = Grid(token_tiles, word_tiles, run, cluster)
        rounds = -(-grid.items // max(1, blocks // cluster))
        time = rounds * (run + 0.25)  # an item starts in a quarter of a tile
        if least is None or time < least:
            best = grid
            least = time
    assert best is not None
    return best


@dataclasses.dataclass(frozen=True)
class Scratch:
    """Shared memory of a thread block."""

    x_s: Ref  # [stages, 128, 64]
    k_s: Ref  # [stages, 64, 256]
    ready: Barrier
    used: Barrier
    labels_s: Ref  # [2, 64]
    rows_s: Ref  # [rows, 2, 64]: what a pass reads, or writes
    rows_ready: Barrier
    terms_s: Ref  # [2, 256]: bias; None without it
    terms_ready: Barrier
    stored_s: Ref  # [2 * SLOTS, 64, 64]: parts of a tile; None if a pass stores none


jax.tree_util.register_dataclass(
    Scratch, data_fields=[field.name for field in dataclasses.fields(Scratch)], meta_fields=[]
)


class Part(NamedTuple):
    """The place of 64 tokens and 64 words of a tile, and what is known of them."""

    settings: Settings
    scratch: Scratch
    warpgroup: Any
    tokens: Any  # slice of the warpgroup's tokens
    word_tile: Any  # index of the tile
    n: int  # of the parts of that tile
    words: int  # V
    has_bias: bool
    has_label: Any  # whether a word of the tile is the label of a token of the warpgroup

    shape = (ROWS, PART)

    @property
    def first(self):
        """Return the first word."""
        return self.word_tile * WORDS + self.n * PART

    def of(self, tile: Array) -> Array:
        """Return this part of a tile [64, 256]."""
        return tile[:, self.n * PART : (self.n + 1) * PART]

    def logits_of(self) -> tuple[Callable[[Array], Array], Array | None]:
        """Return the function from raw to s, and `keep`, as in vocabulary/tile.py."""
        bias = None
        keep = None
        if self.has_bias:
            terms_s = self.scratch.terms_s.at[self.warpgroup, pl.ds(self.n * PART, PART)]
            terms = broadcast_vector(plgpu.load(terms_s, layout=COL), self.shape, 1)
            keep = terms > -jnp.inf
            bias = jnp.where(keep, terms, 0.0)
        if self.words % WORDS:
            inside = positions(self.first, self.shape, 1) < self.words
            keep = inside if keep is None else keep & inside

        def logits_of(raw):
            return logits(self.settings, raw, (bias, None), keep)

        return logits_of, keep

    def is_label(self) -> Array:
        """Return True where the word is the token's label."""
        labels = plgpu.load(self.scratch.labels_s.at[self.warpgroup], layout=ROW)
        return broadcast_vector(labels, self.shape) == positions(self.first, self.shape, 1)

    def row(self, n: int) -> Array:
        """Return row vector `n` of the scratch, for each token."""
        vector = plgpu.load(self.scratch.rows_s.at[n, self.warpgroup], layout=ROW)
        return broadcast_vector(vector, self.shape)

    def store(self, x: Array, ref: Ref) -> None:
        """Store x, in 16 bits, at its place in `ref` [T, V]."""
        slots = self.scratch.stored_s.shape[0] // CONSUMERS
        slot = self.scratch.stored_s.at[slots * self.warpgroup + self.n % slots]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
        slot[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, ref.at[self.tokens, pl.ds(self.first, PART)])


class SumPass(NamedTuple):
    """Compute m, l, hit and total of a run of tiles."""

    wants_total: bool

    rows_in = 0
    stores_tiles = False

    @property
    def rows(self) -> int:
        """Return how many row vectors the scratch holds."""
        return 3 + self.wants_total

    def start(self) -> tuple[Array, ...]:
        """Return m, l, hit and total before the first tile."""
        zeros = full_tile((ROWS,), 0.0)
        return full_tile((ROWS,), -jnp.inf), *[zeros] * (2 + self.wants_total)

    def visit(self, parts: Sequence[Part], raw: Array, sums, outputs, store=None):
        """Return m, l, hit and total after one more tile. `store` takes parts of exp(s - m)."""
        m, l, hit, *total = sums
        s = []
        for part in parts:
            logits_of, keep = part.logits_of()
            s.append(logits_of(part.of(raw)))
            if self.wants_total:
                visible = s[-1] if keep is None else jnp.where(keep, s[-1], 0.0)
                total = [total[0] + visible.sum(axis=1)]

        def add_hits() -> Array:
            hit_sum = full_tile(Part.shape, 0.0)
            for part, x in zip(parts, s, strict=True):
                hit_sum = jnp.where(part.is_label(), x, hit_sum)  # in one part at most
            return hit + hit_sum.sum(axis=1)

        hit = lax.cond(parts[0].has_label, add_hits, lambda: hit)
        new_m = jnp.maximum(m, functools.reduce(jnp.maximum, s).max(axis=1))
        shift = jnp.where(new_m == -jnp.inf, 0.0, new_m)
        shifts = broadcast_vector(shift, Part.shape)
        p_sum = full_tile(Part.shape, 0.0)
        for part, x in zip(parts, s, strict=True):
            p = jnp.exp2((x - shifts) * LOG2_E)
            p_sum = p_sum + p
            if store is not None:
                store(part, p)
        l = l * jnp.exp2((m - shift) * LOG2_E) + p_sum.sum(axis=1)
        return new_m, l, hit, *total

    def finish(self, part: Part, run, sums, outputs) -> None:
        """Store the sums of a run in outputs[0] [rows, runs, T']."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n, x in enumerate(sums):
            part.scratch.rows_s.at[n, part.warpgroup][...] = x
        plgpu.commit_smem()
        for n in range(self.rows):
            row = part.scratch.rows_s.at[n, part.warpgroup]
            plgpu.copy_smem_to_gmem(row, outputs[0].at[n, run, part.tokens])

    def outputs(self, grid: Grid, shape: tuple[int, int]) -> list:
        """Return the types of the outputs."""
        tokens = grid.token_tiles * TOKENS
        return [jax.ShapeDtypeStruct((self.rows, grid.runs, tokens), jnp.float32)]


class ProbabilityPass(NamedTuple):
    """Compute the sums, and keep exp(s - m) of each tile with the m of its time."""

    sums: SumPass

    rows_in = 0
    stores_tiles = True

    @property
    def rows(self) -> int:
        """Return how many row vectors the scratch holds, the last for m."""
        return self.sums.rows + 1

    def start(self) -> tuple[Array, ...]:
        """Return the sums before the first tile."""
        return self.sums.start()

    def visit(self, parts: Sequence[Part], raw: Array, sums, outputs):
        """Return the sums after one more tile, and store its probabilities and m."""
        _, p_ref, m_ref = outputs

        def store(part, p):
            part.store(encode_probabilities(p), p_ref)

        sums = self.sums.visit(parts, raw, sums, outputs, store)
        part = parts[0]
        row = part.scratch.rows_s.at[self.rows - 1, part.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        row[...] = sums[0]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(row, m_ref.at[part.word_tile, part.tokens])
        return sums

    def finish(self, part: Part, run, sums, outputs) -> None:
        """Store the sums of a run."""
        self.sums.finish(part, run, sums, outputs)

    def outputs(self, grid: Grid, shape: tuple[int, int]) -> list:
        """Return the types of the outputs."""
        tokens = grid.token_tiles * TOKENS
        return [
            *self.sums.outputs(grid, shape),
            jax.ShapeDtypeStruct(shape, jnp.int16),
            jax.ShapeDtypeStruct((grid.word_tiles, tokens), jnp.float32),
        ]


# A number from 0 to 1 in 16 bits: of its float32, the lower 7 bits of the exponent and the upper 9
# of the fraction. The sign and the exponent's highest bit are 0. A number that rounds up to 1 is
# exact, and one below 2^-126 keeps fewer bits, as in float32.
SHIFT = 14
HALF_STEP = 1 << (SHIFT - 1)


def encode_probabilities(p: Array) -> Array:
    """Return numbers from 0 to 1, in float32, as such numbers."""
    bits = lax.bitcast_convert_type(p, jnp.int32)
    return lax.shift_right_logical(bits + HALF_STEP, SHIFT).astype(jnp.int16)


def decode_probabilities(codes: Array) -> Array:
    """Return the numbers that `ProbabilityPass` has stored, in float32."""
    bits = lax.shift_left(codes.astype(jnp.int32) & 0xFFFF, jnp.int32(SHIFT))
    return lax.bitcast_convert_type(bits, jnp.float32)


class CotangentPass(NamedTuple):
    """Compute d_raw of each tile, in the dtype of the output."""

    wants_total: bool
    dtype: Any

    stores_tiles = True

    @property
    def rows_in(self) -> int:
        """Return the number of row vectors: lse, its low part, and cotangents of the sums."""
        return 4 + self.wants_total

    rows = rows_in

    def start(self) -> tuple[Array, ...]:
        """Return nothing: tiles share no sums."""
        return ()

    def visit(self, parts: Sequence[Part], raw: Array, sums, outputs):
        """Store d_raw of a tile."""
        for part in parts:
            logits_of, keep = part.logits_of()
            s, pull = jax.vjp(logits_of, part.of(raw))
            shifted = (s - part.row(0)) - part.row(1)
            if keep is not None:
                shifted = jnp.where(keep, shifted, -jnp.inf)
            ds = jnp.exp2(shifted * LOG2_E) * part.row(2)
            ds = lax.cond(part.has_label, functools.partial(self._add_hit, part), lambda x: x, ds)
            if self.wants_total:
                ds = ds + part.row(4)
            (d_raw,) = pull(ds)
            part.store(d_raw.astype(self.dtype), outputs[0])
        return ()

    def _add_hit(self, part: Part, ds: Array) -> Array:
        """Add the cotangent of the label's logit."""
        return ds + jnp.where(part.is_label(), part.row(3), 0.0)

    def finish(self, part: Part, run, sums, outputs) -> None:
        """Do nothing."""

    def outputs(self, grid: Grid, shape: tuple[int, int]) -> list:
        """Return the type of d_raw."""
        return [jax.ShapeDtypeStruct(shape, self.dtype)]


Pass = SumPass | ProbabilityPass | CotangentPass


def visit_logits(
    settings: Settings,
    what: Pass,
    operands: tuple[Array, Array, Array],
    bias: Array | None = None,
    rows: Sequence[Array] = (),
) -> list[Array]:
    """Return the outputs of a pass over all logits of `operands`: x [T, H], kernel [H, V], labels.

    `labels` [T] are int32, and `bias` [V] is float32, -inf where a word is hidden. `rows` are the
    vectors [T] that the pass reads. H and V are multiples of 64.
    """
    x, kernel, labels = operands
    T, H = x.shape
    V = kernel.shape[1]
    blocks = multiprocessors()
    grid = choose_grid(T, V, blocks)
    clusters = min(max(1, blocks // grid.cluster), grid.items)
    steps = -(-H // FEATURES)
    padding = grid.token_tiles * TOKENS - T
    labels = jnp.pad(labels, (0, padding))
    arrays = [labels, _tiles_with_labels(labels, grid.word_tiles)]
    if rows:
        arrays.append(jnp.pad(jnp.stack(rows), [(0, 0), (0, padding)]))
    if bias is not None:
        arrays.append(jnp.pad(bias, (0, grid.word_tiles * WORDS - V)))

    def body(x_ref, k_ref, labels_ref, marks_ref, *refs, scratch: Scratch):
        remaining = list(refs)
        rows_ref = remaining.pop(0) if rows else None
        bias_ref = remaining.pop(0) if bias is not None else None
        warpgroup = lax.axis_index("warpgroup")
        inputs = ConsumerInputs(labels_ref, marks_ref, rows_ref, bias_ref)
        consumer = Consumer(settings, what, grid, scratch, inputs, remaining, warpgroup, V, steps)
        _run_warpgroup(consumer, Producer(grid, scratch, x_ref, k_ref, steps), clusters)

    launch = warp_specialized_kernel(
        body,
        f"memeff_vocabulary_{type(what).__name__.removesuffix('Pass').lower()}",
        what.outputs(grid, (T, V)),
        {"scratch": _scratch(what, x.dtype, bias is not None, grid.cluster)},
        clusters * grid.cluster,
        CONSUMERS + 1,
        approx_math=settings.soft_cap is None,
        cluster=grid.cluster,
    )
    return list(launch(x, kernel, *arrays))


def _tiles_with_labels(labels: Array, word_tiles: int) -> Array:
    """Return 1 where a tile of words has the label of one of 64 tokens, int32 [T' / 64, tiles].

    A label that is no word may mark a tile, too. That costs time, but changes nothing.
    """
    warpgroups = jnp.arange(len(labels)) // ROWS
    marks = jnp.zeros((len(labels) // ROWS, word_tiles), jnp.int32)
    return marks.at[warpgroups, labels // WORDS].set(1, mode="drop")


def _scratch(what: Pass, dtype, has_bias: bool, cluster: int) -> Scratch:
    """Return the types of a thread block's shared memory."""
    vectors = 1 + what.rows_in
    return Scratch(
        x_s=tile_ref(STAGES, TOKENS, FEATURES, dtype),
        k_s=tile_ref(STAGES, FEATURES, WORDS, dtype),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        used=cluster_barriers(cluster, CONSUMERS, STAGES),
        labels_s=plgpu.SMEM((CONSUMERS, ROWS), jnp.int32),
        rows_s=plgpu.SMEM((what.rows, CONSUMERS, ROWS), jnp.float32),
        rows_ready=plgpu.Barrier(num_arrivals=vectors, num_barriers=CONSUMERS),
        terms_s=plgpu.SMEM((CONSUMERS, WORDS), jnp.float32) if has_bias else None,
        terms_ready=plgpu.Barrier(num_barriers=CONSUMERS) if has_bias else None,
        stored_s=_stored(what, dtype) if what.stores_tiles else None,
    )


def _stored(what: Pass, dtype) -> Ref:
    """Return the type of the parts of tiles that are being stored."""
    stored = jnp.int16 if isinstance(what, ProbabilityPass) else dtype
    return tile_ref(SLOTS * CONSUMERS, ROWS, PART, stored)


class Producer(NamedTuple):
    """The warpgroup that copies."""

    grid: Grid
    scratch: Scratch
    x_ref: Ref  # [T, H]
    k_ref: Ref  # [H, V]
    steps: int  # of a product

    def run_item(self, index, done):
        """Copy the operands of all steps of an item. Return the steps done in all items."""
        scratch = self.scratch
        token_tile, run = self.grid.tile(index)
        first = run * self.grid.run
        tiles = jnp.minimum(self.grid.run, self.grid.word_tiles - first)
        steps = jnp.int32(self.steps)
        stages = scratch.x_s.shape[0]
        tokens = pl.ds(token_tile * TOKENS, TOKENS)

        def copy(n, _):
            step = done + n
            slot = lax.rem(step, jnp.int32(stages))
            words = pl.ds((first + lax.div(n, steps)) * WORDS, WORDS)
            features = pl.ds(lax.rem(n, steps) * FEATURES, FEATURES)
            pl.when(step >= stages)(lambda: plgpu.barrier_wait(scratch.used.at[slot]))
            ready = scratch.ready.at[slot]
            plgpu.copy_gmem_to_smem(self.x_ref.at[tokens, features], scratch.x_s.at[slot], ready)
            k_tile = self.k_ref.at[features, words]
            copy_to_cluster(k_tile, scratch.k_s.at[slot], ready, self.grid.cluster)

        lax.fori_loop(0, tiles * self.steps, copy, None)
        return done + tiles * self.steps


class ConsumerInputs(NamedTuple):
    """The arrays in global memory that consumers read."""

    labels: Ref  # [T']
    marks: Ref  # of `_tiles_with_labels`
    rows: Ref  # [rows, T'], or None
    bias: Ref  # [V'], or None


class Consumer(NamedTuple):
    """A warpgroup that computes."""

    settings: Settings
    what: Pass
    grid: Grid
    scratch: Scratch
    inputs: ConsumerInputs
    outputs: list[Ref]
    warpgroup: Any
    words: int  # V
    steps: int  # of a product

    def run_item(self, index, done):
        """Visit the tiles of an item. Return the steps done in all items."""
        token_tile, run = self.grid.tile(index)
        first = run * self.grid.run
        tiles = jnp.minimum(self.grid.run, self.grid.word_tiles - first)
        tokens = pl.ds(token_tile * TOKENS + self.warpgroup * ROWS, ROWS)
        self._load_rows(tokens)

        has_bias = self.inputs.bias is not None

        def parts_of(word_tile, has_label=None) -> list[Part]:
            place = self.settings, self.scratch, self.warpgroup, tokens, word_tile
            parts = range(WORDS // PART)
            return [Part(*place, n, self.words, has_bias, has_label) for n in parts]

        def visit(n, sums):
            mark = self.inputs.marks[token_tile * CONSUMERS + self.warpgroup, first + n]
            self._start_terms(first + n)
            product = functools.partial(self._product, done + n * self.steps)
            raw = accumulators(product, (ROWS, WORDS))
            if has_bias:
                plgpu.barrier_wait(self.scratch.terms_ready.at[self.warpgroup])
            return self.what.visit(parts_of(first + n, mark > 0), raw, sums, self.outputs)

        sums = lax.fori_loop(0, tiles, visit, self.what.start())
        self.what.finish(parts_of(first)[0], run, sums, self.outputs)
        return done + tiles * self.steps

    def _load_rows(self, tokens) -> None:
        """Copy the numbers of this warpgroup's tokens to shared memory."""
        ready = self.scratch.rows_ready.at[self.warpgroup]
        labels_s = self.scratch.labels_s.at[self.warpgroup]
        plgpu.copy_gmem_to_smem(self.inputs.labels.at[tokens], labels_s, ready)
        for n in range(self.what.rows_in):
            row = self.scratch.rows_s.at[n, self.warpgroup]
            plgpu.copy_gmem_to_smem(self.inputs.rows.at[n, tokens], row, ready)
        plgpu.barrier_wait(ready)

    def _start_terms(self, word_tile) -> None:
        """Start to copy the bias of a tile's words."""
        bias_ref = self.inputs.bias
        if bias_ref is None:
            return
        words = pl.ds(word_tile * WORDS, WORDS)
        ready = self.scratch.terms_ready.at[self.warpgroup]
        plgpu.commit_smem()  # all threads have read the bias of the tile before
        plgpu.copy_gmem_to_smem(bias_ref.at[words], self.scratch.terms_s.at[self.warpgroup], ready)

    def _product(self, done, total) -> Array:
        """Return raw of a tile, whose first step is `done`."""
        scratch = self.scratch
        stages = scratch.x_s.shape[0]
        rows = pl.ds(self.warpgroup * ROWS, ROWS)

        unrolled = 1 if self.steps % UNROLLED else UNROLLED

        def step(n, _):
            used = None
            for more in range(unrolled):
                slot = lax.rem(done + n * unrolled + more, jnp.int32(stages))
                plgpu.barrier_wait(scratch.ready.at[slot])
                plgpu.wgmma(total, scratch.x_s.at[slot, rows], scratch.k_s.at[slot])  # (1)
                if used is not None:
                    plgpu.wgmma_wait(1)
                    plgpu.barrier_arrive(used)
                used = scratch.used.at[slot]
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(used)

        lax.fori_loop(0, self.steps // unrolled, step, None)
        return plgpu.wgmma_accumulator_load(total, wait_n=0)


def _run_warpgroup(consumer: Consumer, producer: Producer, clusters: int) -> None:
    """Run a warpgroup of one of so many clusters, which takes every `clusters`-th item."""
    cluster = lax.axis_index("block")
    count = lax.div(consumer.grid.items - 1 - cluster, jnp.int32(clusters)) + 1

    def run_items(role: Consumer | Producer):
        def run_item(n, done):
            return role.run_item(n * clusters + cluster, done)

        return lax.fori_loop(0, count, run_item, jnp.int32(0))

    @pl.when(consumer.warpgroup < CONSUMERS)
    def _consume():
        take_registers(CONSUMERS, computes=True)
        run_items(consumer)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(consumer.warpgroup == CONSUMERS)
    def _produce():
        take_registers(CONSUMERS, computes=False)
        done = run_items(producer)
        drain(done, STAGES, [producer.scratch.used])
