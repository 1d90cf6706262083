"""Compute sampled rows and columns of a call in float64, beside those that an attention gave.

The logits of a sampled row give its lse, out and dq. A sampled column j needs lse and out of all
rows, as the call gave them:
  p_i  = exp(s_ij - lse_i)                dv = sum p_i dout_i
  ds_i = p_i (dout_i v_j - dout_i out_i)  dk = sum d_raw_i q_i, with d_raw from ds
With a sink, p_i is exp(s_ij - lse_i) / (1 + exp(sink - lse_i)), because lse is over the keys.

Where the sequence is sharded over devices, all devices work on the same sample. Each computes with
the keys, or the queries, that it holds, and they exchange one row and sums of a row. So no device
gathers the sequence. Tokens stay in the order of the layout, because each comes with its position.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memeff import sharding
from memeff.chunked.tile import Tile, tile_logits
from memeff.masking import mask_tile, pair_indices
from memeff.problem import Operands, Problem, map_operands, split_axis, split_heads
from memeff.slicing import slice_letters


class Inputs(NamedTuple):
    """The arrays of a call and of its results, from which samples are cut."""

    operands: Operands
    out: Array  # B T N D
    lse: Array  # B T N
    dquery: Array  # B T N H
    dkey: Array  # B S K H
    dvalue: Array  # B S K D
    dout: Array  # B T N D
    q_pos: Array  # T, the position of each query
    k_pos: Array  # S


# the letters of the dims, as in problem.OPERAND_DIMS
DIMS = {
    "out": "btnd",
    "lse": "btn",
    "dquery": "btnh",
    "dkey": "bskh",
    "dvalue": "bskd",
    "dout": "btnd",
    "q_pos": "t",
    "k_pos": "s",
}


class Axes(NamedTuple):
    """The axes of a mesh over which batch entries, key heads and tokens are sharded."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def by_letter(self) -> dict[str, tuple[str, ...] | None]:
        """Return the axes over which the dim of each letter is sharded; None: it is whole."""
        batch, heads, tokens = (names or None for names in self)
        return {"b": batch, "n": heads, "k": heads, "t": tokens, "s": tokens}


class Placement(NamedTuple):
    """The mesh and its axes over which the arrays of a sequence are sharded."""

    mesh: Mesh | None = None  # None: the sequence is not sharded
    axes: Axes = Axes()


class Row(NamedTuple):
    """The results of a sampled row, of all heads of a group."""

    lse: Array  # G
    out: Array  # G D
    query: Array  # G H, the gradient


class Column(NamedTuple):
    """The gradients of a sampled key."""

    key: Array  # H
    value: Array  # D


def sampled(key: Array, sizes: tuple[int, ...], samples: int, parts: int) -> np.ndarray:
    """Return [samples, 3]: batch entry, key head, token.

    The samples take turns among `parts` equal parts of the tokens.
    """
    sizes = (*sizes[:-1], sizes[-1] // parts)
    columns = []
    for column_key, size in zip(jax.random.split(key, 3), sizes, strict=True):
        indices = jax.random.randint(column_key, (samples,), 0, size)
        columns.append(np.asarray(indices))
    columns[-1] = columns[-1] + np.arange(samples, dtype=np.int32) % parts * sizes[-1]
    return np.stack(columns, 1)


# ---- where the arrays lie


def find_placement(axes: tuple[str, ...], arrays: list[Array]) -> Placement:
    """Return the placement of query, key and value, whose tokens are sharded over `axes`."""
    meshes: list[Any] = [jax.sharding.get_mesh()]
    for x in arrays:
        if isinstance(x.sharding, NamedSharding):
            meshes.append(x.sharding.mesh)
    mesh = next(mesh for mesh in meshes if set(axes) <= set(mesh.axis_names))
    key = arrays[1]
    entries = [None] * key.ndim
    if isinstance(key.sharding, NamedSharding):
        for dim, entry in enumerate(key.sharding.spec):
            entries[dim] = entry

    def names(entry: Any) -> tuple[str, ...]:
        """Return the mesh axes of an entry of a spec, without those of the sequence."""
        names = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in names if name in mesh.axis_names and name not in axes)

    batch = names(entries[0]) if key.ndim == 4 else ()  # folded leading dims are gathered
    return Placement(sharding.auto_mesh(mesh), Axes(batch, names(entries[-2]), axes))


def lay_out(placement: Placement, inputs: Inputs) -> Inputs:
    """Lay the arrays out so that each device has its tokens, and needs no others."""
    mesh = placement.mesh
    if mesh is None:
        return sharding.on_auto_mesh(inputs)

    def put(x: Array, spec: PartitionSpec) -> Array:
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, inputs, _specs(placement.axes, inputs))


def _specs(axes: Axes, inputs: Inputs) -> Any:
    """Return the inputs with a spec in the place of each array."""
    spec = functools.partial(sharding.operand_spec, axes.by_letter)
    specs: dict[str, Any] = {}
    for name, dims in DIMS.items():
        specs[name] = spec(getattr(inputs, name), dims)
    specs["operands"] = map_operands(spec, inputs.operands)
    return sharding.complete_specs(inputs._replace(**specs))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def compute(
    f: Callable, problem: Problem, placement: Placement, inputs: Inputs, samples: Array
) -> Any:
    """Return f(problem, axes, inputs, sample) for each sample, on all devices of the mesh."""

    def each(inputs: Inputs, samples: Array) -> Any:
        return lax.map(functools.partial(f, problem, placement.axes, inputs), samples)

    if placement.mesh is None:
        return each(inputs, samples)
    specs = _specs(placement.axes, inputs), PartitionSpec()
    run = jax.shard_map(
        each, mesh=placement.mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False
    )
    return run(inputs, samples)


# ---- one row, and one column


def one_row(problem: Problem, axes: Axes, inputs: Inputs, sample: Array):
    """Return a row as the call gave it, in float64, and the size of the terms of its dq."""
    cut = Cut(axes, inputs.operands, sample, "t")
    tile = cut_sample(problem, cut, inputs, (), ("dout",))
    s, pull = _logits(problem, tile)  # g 1 c
    m = lax.pmax(s.max(-1, keepdims=True), axes.tokens)
    m = jnp.where(m == -jnp.inf, 0, m)  # a row that sees no key
    l = lax.psum(jnp.exp(s - m).sum(-1, keepdims=True), axes.tokens)
    lse = m + jnp.log(l)
    p = jnp.exp(s - m) / jnp.where(l == 0, 1, l) * _share_of_keys(tile, lse)
    v = tile.operands.value[0, 0]
    do = tile.row_vectors[0][0, 0]  # g 1 d
    out = lax.psum(p @ v, axes.tokens)
    dp = do @ v.T
    delta = (do * out).sum(-1, keepdims=True)
    dq, _ = pull(p * (dp - delta))
    dq_size, _ = pull(_size_of_terms(p, do, v, out))
    dq, dq_size = lax.psum((dq, dq_size), axes.tokens)
    truth = Row(lse[:, 0, 0], out[:, 0], dq[0, 0, :, 0])
    actual = Row(*(cut.of(inputs, name)[0, 0] for name in ("lse", "out", "dquery")))
    return cut.share((actual, truth, dq_size[0, 0, :, 0]))


def one_column(problem: Problem, axes: Axes, inputs: Inputs, sample: Array):
    """Return dk and dv of a key as the call gave them, in float64, and the size of dk's terms."""
    cut = Cut(axes, inputs.operands, sample, "s")
    tile = cut_sample(problem, cut, inputs, ("lse",), ("dout", "out"))
    s, pull = _logits(problem, tile)  # g t 1
    do, o = (x[0, 0] for x in tile.row_vectors)  # g t d
    row_lse = tile.row_scalars[0][0, 0, :, :, None]  # g t 1
    p = jnp.where(row_lse == -jnp.inf, 0, jnp.exp(s - row_lse)) * _share_of_keys(tile, row_lse)
    v = tile.operands.value[0, 0]
    dp = do @ v.T
    delta = (do * o).sum(-1, keepdims=True)
    _, dk = pull(p * (dp - delta))
    dv = (p * do).sum((0, 1))
    _, dk_size = pull(_size_of_terms(p, do, v, o))
    dk, dv, dk_size = lax.psum((dk[0, 0, 0], dv, dk_size[0, 0, 0]), axes.tokens)
    actual = Column(*(cut.of(inputs, name)[0, 0, 0] for name in ("dkey", "dvalue")))
    return cut.share((actual, Column(dk, dv), dk_size))


def _share_of_keys(tile: Tile, lse: Array) -> Array | float:
    """Return the probability of all keys of rows, G t 1, whose lse is over the keys: 1, or less."""
    sinks = tile.operands.logit_params.sinks
    if sinks is None:
        return 1.0
    share = jax.nn.sigmoid(lse - sinks.reshape(-1, 1, 1))
    return jnp.where(lse == -jnp.inf, 0, share)


def _size_of_terms(p: Array, do: Array, v: Array, out: Array) -> Array:
    """Return the size of the terms of p (do v' - do out').

    Rounding errs by a part of this size even where the terms cancel.
    """
    dp_square = (do**2) @ (v**2).T
    delta_square = ((do * out) ** 2).sum(-1, keepdims=True)
    return p * jnp.sqrt(dp_square + delta_square)


class Cut:
    """The cuts of arrays to one batch entry, one key head, and one query or key.

    Each device cuts the tokens that it has. The one query, or key, comes from its device to all.
    """

    def __init__(self, axes: Axes, operands: Operands, sample: Array, letter: str):
        B, T, N, _ = operands.query.shape  # of this device
        S, K = operands.key.shape[1:3]
        self.axes = axes
        self.letter = letter  # "t" for a row, "s" for a column
        self.token = sample[2]
        self.columns = _first(S, axes.tokens), S  # those of the keys of this device
        self.first = sample[0], sample[1]  # batch entry and key head of the whole call
        b, self.has_b = _local(sample[0], B, axes.batch)
        k, self.has_k = _local(sample[1], K, axes.heads)
        token, self.has_token = _local(sample[2], T if letter == "t" else S, axes.tokens)
        G = N // K
        self.cuts = {"b": (b, 1), "n": (k * G, G), "k": (k, 1), letter: (token, 1)}

    def __call__(self, x: Array, dims: str) -> Array:
        """Return the cut of `x`, whose dims have the letters `dims`."""
        cuts = self.cuts
        if dims == "bnts" and self.letter == "s":  # each device has all columns of its rows
            return slice_letters(x, dims, cuts | {"s": (self.token, 1)})
        x = slice_letters(x, dims, cuts)
        if self.letter in dims:
            x = _from_device(x, self.has_token, self.axes.tokens)
        return slice_letters(x, dims, {"s": self.columns}) if dims == "bnts" else x

    def of(self, inputs: Inputs, name: str) -> Array:
        """Return the cut of the named input."""
        return self(getattr(inputs, name), DIMS[name])

    def share(self, tree: Any) -> Any:
        """Return, on all devices, the results of those that have the batch entry and the head."""

        def share(x: Array) -> Array:
            return _from_device(x, self.has_b & self.has_k, self.axes.batch + self.axes.heads)

        return jax.tree.map(share, tree)


def _first(size: int, axes: tuple[str, ...]) -> Any:
    """Return the number of the first of the `size` entries of this device."""
    return lax.axis_index(axes) * size if axes else 0


def _local(index: Array, size: int, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """Return the index within the `size` entries of this device, and whether it has the entry."""
    index = index - _first(size, axes)
    return jnp.clip(index, 0, size - 1), (0 <= index) & (index < size)


def _from_device(x: Array, has: Array, axes: tuple[str, ...]) -> Array:
    """Return on all devices the `x` of that one for which `has` is True."""
    if not axes:
        return x
    numbers = x.astype(jnp.int8) if x.dtype == bool else x
    return lax.psum(jnp.where(has, numbers, 0), axes).astype(x.dtype)


def cut_sample(
    problem: Problem, cut: Cut, inputs: Inputs, row_scalars: tuple[str, ...], row_vectors
) -> Tile:
    """Return the tile of one row, or one column, of one key head, in float64.

    `row_scalars` and `row_vectors` name inputs. Numbers that are not finite become 0, because
    0 * NaN is NaN for a hidden pair, too.
    """
    operands = split_heads(map_operands(cut, inputs.operands), 1)
    q_pos, k_pos = cut.of(inputs, "q_pos"), cut.of(inputs, "k_pos")
    like = operands.query[..., 0, 0]  # 1 1 g
    indices = pair_indices(problem, operands, like, cut.first, q_pos, k_pos)
    keep = mask_tile(problem, operands, q_pos, k_pos, indices)

    def widen(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def clean(x):
        return jnp.where(jnp.isfinite(x), x, 0)

    def by_head(x):
        """Return x [1, t, G, ...] as [1, 1, G, t, ...]."""
        return jnp.moveaxis(split_axis(x, 2, 1), 1, 3)

    scalars = [by_head(widen(cut.of(inputs, name))) for name in row_scalars]
    vectors = [by_head(clean(widen(cut.of(inputs, name)))) for name in row_vectors]
    operands = jax.tree.map(widen, operands)
    query, key, value = map(clean, operands[:3])
    return Tile(
        operands=operands._replace(query=query, key=key, value=value),
        row_scalars=tuple(scalars),  # 1 1 g t
        row_vectors=tuple(vectors),  # 1 1 g t d
        positions=(q_pos, k_pos),
        indices=indices,
        keep=keep,
        head_start=cut.first,
        row_start=q_pos[0],
        col_start=k_pos[0],
        sizes=(1, 1, 1),  # read by dropout alone
    )


def _logits(problem: Problem, tile: Tile):
    """Return the logits G t c of the tile's head, and their pullback to its queries and keys."""

    def logits(query, key):
        operands = tile.operands._replace(query=query, key=key)
        _, s, _ = tile_logits(problem, tile._replace(operands=operands))
        return s[0, 0]

    return jax.vjp(logits, *tile.operands[:2])
