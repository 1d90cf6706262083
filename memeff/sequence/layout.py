"""Define which tokens of a sharded sequence each device holds.

Each of P devices has L = T / P of the T tokens of a sequence. "contiguous": device r has tokens r L
to (r + 1) L. "striped": it has tokens r, r + P, r + 2 P ... "zigzag": the sequence has 2 P chunks,
and device r has chunk r, the early one, and chunk 2 P - 1 - r, the late one. In causal order all
devices then have the same work (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from memeff.inputs import check_choice, check_size, kind_of, to_array
from memeff.shape import round_up
from memeff.sharding import shared_by, with_whole_dim

Layout = Literal["contiguous", "zigzag", "striped"]
LAYOUTS = get_args(Layout)


def chunks_of_device(layout: Layout) -> int:
    """Return how many chunks of consecutive tokens a device has."""
    return 2 if layout == "zigzag" else 1


def chunk_start(layout: Layout, devices: int, device, chunk, length: int):
    """Return the position of the first token of a device's chunk, which has `length` tokens.

    `device` and `chunk` are ints or int32 arrays.
    """
    match layout:
        case "contiguous":
            return device * length
        case "striped":
            return device
    late = 2 * devices - 1 - device
    return (device + chunk * (late - device)) * length


def stride_of(layout: Layout, devices: int) -> int:
    """Return how many tokens lie between neighbours of a chunk."""
    return devices if layout == "striped" else 1


def sequence_positions(length: int, devices: int, layout: Layout = "zigzag") -> np.ndarray:
    """Return the positions of the tokens [T] in the order in which devices hold them.

    For tokens x in their own order, `x[:, positions]` is the order to shard over a mesh axis of
    `devices`. Pass the positions to rotary embeddings outside of attention.

    Args:
      length: T in tokens, a multiple of `devices` (for "zigzag", of 2 * devices).
      devices: number of devices P along the sequence.
      layout: "contiguous", "zigzag" or "striped".

    Returns: int32 [T], in tokens.

    Raises: ValueError if `layout` is unknown, or T is no such multiple.

    Example:
      >>> sequence_positions(8, 2).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    check_layout_name(layout, "layout")
    length = check_size("length", length, 0)
    check_length("length", length, devices, layout)
    tokens = np.arange(length, dtype=np.int32)
    if layout == "contiguous":
        return tokens
    if layout == "striped":
        return tokens.reshape(-1, devices).T.reshape(-1)
    return tokens.reshape(2 * devices, -1)[_zigzag_chunks(devices)].reshape(-1)


def to_zigzag(tree: Any, devices: int, axis: int = 1) -> Any:
    """Reorder tokens to the zigzag layout, for a mesh axis of `devices` that shards them.

    Each device then has one chunk from the front and one from the back, so that causal attention
    gives all devices the same work. Call it once, where data is loaded, with all arrays that have
    one entry for each token: tokens, labels, positions, segment ids.

    Args:
      tree: a pytree of arrays with T tokens along `axis`; T is a multiple of 2 * devices.
      devices: number of devices P along the sequence.
      axis: the dim of tokens, the same in all arrays.

    Returns: the pytree with reordered arrays. An array that is sharded over `devices` devices along
      `axis` stays sharded: each device sends and receives two chunks. (Under jit on an Auto mesh
      the sharding is not known, and XLA may gather the array.) `from_zigzag` undoes it.

    Raises: ValueError if T is no multiple of 2 * devices.

    Example:
      >>> to_zigzag(jnp.arange(8), 2, axis=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return _reorder(tree, devices, axis, True)


def from_zigzag(tree: Any, devices: int, axis: int = 1) -> Any:
    """Undo `to_zigzag`: return tokens to their own order.

    Args: as those of `to_zigzag`.

    Returns: the pytree with reordered arrays.

    Raises: ValueError if T is no multiple of 2 * devices.

    Example:
      >>> from_zigzag(to_zigzag(jnp.arange(8), 2, axis=0), 2, axis=0).tolist()
      [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _reorder(tree, devices, axis, False)


def _reorder(tree: Any, devices: int, axis: int, into_zigzag: bool) -> Any:
    """Reorder the 2 * devices chunks along `axis` of each array of a pytree."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"axis must be an int, got {kind_of(axis)}.")

    def reorder(path, x):
        name = f"tree{jax.tree_util.keystr(path)}"
        if not isinstance(x, np.ndarray):
            x = to_array(name, x)
        if not -x.ndim <= axis < x.ndim:
            raise ValueError(f"{name} has shape {x.shape} and no axis {axis}.")
        dim = axis % x.ndim
        check_length(f"dim {dim} of {name}", x.shape[dim], devices, "zigzag")
        take = functools.partial(_take_chunks, devices=devices, axis=dim, into_zigzag=into_zigzag)
        if isinstance(x, np.ndarray):
            return take(x)
        if devices == 1 or x.size == 0:
            return x
        sharding = shared_by(x, dim, devices)
        if sharding is not None:
            return _send_chunks(x, sharding, dim, into_zigzag)
        return with_whole_dim(take, x, dim)

    return jax.tree.map_with_path(reorder, tree)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _send_chunks(x: Array, sharding: NamedSharding, dim: int, into_zigzag: bool) -> Array:
    """Reorder the chunks of an array where it lies, on P devices along `dim`.

    A device has one even and one odd chunk in either order, so even and odd chunks can travel in
    one message each.
    """
    axes = sharding.spec[dim]
    devices = x.shape[dim] // sharding.shard_shape(x.shape)[dim]
    in_order = np.arange(2 * devices)  # the device of each chunk
    in_zigzag = np.minimum(in_order, in_order[::-1])
    start, end = in_order // 2, in_zigzag
    if not into_zigzag:
        start, end = end, start

    def move(part: Array) -> Array:
        swaps = lax.axis_index(axes) % 2 == 1  # in zigzag, the early chunk of such a device is odd
        even, odd = jnp.split(part, 2, axis=dim)
        if not into_zigzag:
            even, odd = jnp.where(swaps, odd, even), jnp.where(swaps, even, odd)
        chunks = []
        for parity, chunk in enumerate((even, odd)):
            pairs = zip(start[parity::2], end[parity::2], strict=True)
            chunks.append(lax.ppermute(chunk, axes, [(int(a), int(b)) for a, b in pairs]))
        even, odd = chunks
        if into_zigzag:
            even, odd = jnp.where(swaps, odd, even), jnp.where(swaps, even, odd)
        return jnp.concatenate([even, odd], axis=dim)

    spec = sharding.spec
    return jax.shard_map(move, mesh=sharding.mesh, in_specs=spec, out_specs=spec)(x)


def _take_chunks(x: Any, devices: int, axis: int, into_zigzag: bool) -> Any:
    """Reorder the 2 * devices chunks along `axis` of a NumPy or JAX array; any dim may be 0."""
    order = _zigzag_chunks(devices)
    if not into_zigzag:
        order = np.argsort(order)
    count = 2 * devices
    chunks = x.reshape(*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :])
    return chunks.take(order, axis=axis).reshape(x.shape)


def _zigzag_chunks(devices: int) -> np.ndarray:
    """Return the numbers of the 2 P chunks in the order of the devices."""
    early = np.arange(devices)
    return np.stack([early, 2 * devices - 1 - early], axis=1).reshape(-1)


def natural_order(x: Array, layout: Layout, devices: int, axis: int) -> Array:
    """Return an array whose `axis` holds all tokens in `layout`, with tokens in their own order."""
    return _rearrange(x, layout, devices, axis, False)


def layout_order(x: Array, layout: Layout, devices: int, axis: int) -> Array:
    """Undo `natural_order`."""
    return _rearrange(x, layout, devices, axis, True)


def _rearrange(x: Array, layout: Layout, devices: int, axis: int, into_layout: bool) -> Array:
    """Move tokens along `axis` into a layout, or back into their own order."""
    if layout == "contiguous" or devices == 1:
        return x
    shape = x.shape
    if layout == "zigzag":
        return _take_chunks(x, devices, axis, into_layout)
    each = shape[axis] // devices
    sizes = (each, devices) if into_layout else (devices, each)
    stripes = x.reshape(*shape[:axis], *sizes, *shape[axis + 1 :])
    return jnp.swapaxes(stripes, axis, axis + 1).reshape(shape)


def check_layout_name(layout: Any, name: str = "sequence_layout") -> None:
    """Refuse an unknown layout."""
    check_choice(name, layout, LAYOUTS)


def check_length(name: str, length: int, devices: int, layout: Layout) -> None:
    """Refuse a number of tokens that the devices cannot share equally."""
    devices = check_size("devices", devices)
    parts = chunks_of_device(layout) * devices
    if length % parts:
        raise ValueError(
            f'{name} has {length} tokens, and layout "{layout}" over {devices} devices needs a '
            f"multiple of {parts}: pad to {round_up(length, parts)} tokens, and hide the "
            "padding with query_seq_lengths and key_value_seq_lengths."
        )
