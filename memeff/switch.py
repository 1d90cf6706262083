"""Switch code that calls `jax.nn.dot_product_attention` to memeff.

A context is part of the key of JAX's caches (`jax.make_user_context`). So a function that was
jitted before is traced again inside, and programs traced inside are not used outside.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from memeff import implementations, sharding
from memeff.arguments import Implementation, Strategy
from memeff.attention import dot_product_attention
from memeff.inputs import check_bool, check_choice, to_array
from memeff.sequence.call import find_sequence_mesh
from memeff.sequence.keywords import SequenceOptions, check_sequence_options
from memeff.sequence.layout import Layout
from memeff.validate_options import check_implementation
from memeff.warn import warn


class Choice(NamedTuple):
    """The arguments of a switch that change what runs."""

    implementation: Implementation | None
    sequence: SequenceOptions


# The Choice of the innermost switch of this thread; None outside.
_choice = jax.make_user_context(None)
_ran: set[Choice] = set()  # choices under which JAX's cache may hold programs


@dataclasses.dataclass
class _Switch:
    """Calls that one switch saw."""

    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)  # of `query`
    called: bool = False  # something called JAX's function, in this switch or in an inner one
    ran: bool = False  # memeff ran such a call


class _Switches(threading.local):
    """The switches that this thread is in, the innermost last."""

    def __init__(self):  # once for each thread
        self.stack: list[_Switch] = []


_switches = _Switches()
_lock = threading.Lock()
_inside = 0  # number of switches that all threads together are in
# JAX's function, and the one by which the first of these switches replaced it.
_replaced = _replacement = jax.nn.dot_product_attention


@contextlib.contextmanager
def switch_jax_nn(
    implementation: Implementation | None = None,
    *,
    strict: bool = False,
    sequence_axis: str | tuple[str, str] | None = None,
    sequence_layout: Layout = "contiguous",
    context_parallel: Strategy | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
) -> Iterator[list[tuple[int, ...]]]:
    """Make `jax.nn.dot_product_attention` compute with memeff, whichever library calls it.

    Use it as a context: `with switch_jax_nn():`. Inside, the function takes the same arguments as
    JAX's, with the same meaning, except that:

    * A query that sees no key gives 0 and lse -inf, where JAX gives the mean of the values.
    * The caller's `implementation=` ("xla", "cudnn", "triton") is ignored, because it chooses among
      JAX's implementations.
    * A side of `local_window_size` below 0 is refused.

    The switch reaches every call by the full name, for example by Keras, and needs no Flax. It does
    not reach the following code, but `memeff.replace_attention` does:

    * Code that imports the function itself, `from jax.nn import dot_product_attention`.
    * Flax NNX's attention with dropout; `memeff.nn.switch_nnx` reaches it, too.
    * `haiku.MultiHeadAttention`, and `equinox.nn.MultiheadAttention` without dropout, because they
      write their attention out. `docs/adopting.md` has subclasses of both that call memeff.

    The switch holds for this thread: calls from other threads reach JAX's function as before. (The
    name is replaced for the whole process, and restored when the last switch is left, also by an
    exception.) Switches may be nested. Functions that were jitted earlier are traced again inside.

    Args:
      implementation: as in `memeff.dot_product_attention`: None (memeff chooses), "xla",
        "reference" or "pallas".
      strict: raise an error, instead of a warning, if memeff ran no call.
      sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis: as in
        `memeff.dot_product_attention`. With sequence_axis, the sequence of all calls inside is
        sharded over devices.

    Returns:
      A list of the shapes of `query` in the calls that memeff ran, filled as they are traced. Calls
      inside an inner switch appear in the inner list. A function that was compiled in an earlier
      switch is not traced again, and its calls are not listed.

    Raises:
      ValueError: a choice is not known; or, with `strict`, memeff ran no call. If an earlier switch
        of this process ran calls, JAX's cache may still hold them, so there is neither an error nor
        a warning.

    Example:
      >>> x = jax.numpy.ones((2, 7, 4, 8))
      >>> with switch_jax_nn() as calls:
      ...     out = jax.nn.dot_product_attention(x, x, x)
      >>> calls
      [(2, 7, 4, 8)]
    """
    global _inside, _replaced, _replacement
    check_bool("strict", strict)
    check_implementation(implementation)
    name = "switch_jax_nn: implementation"
    check_choice(name, implementation, implementations.IMPLEMENTATIONS, optional=True)
    sequence = SequenceOptions(
        sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis
    )
    check_sequence_options(sequence)
    choice = Choice(implementation, sequence)
    switch = _Switch()
    with _lock:
        if not _inside:
            _replaced = jax.nn.dot_product_attention
            _replacement = jax.nn.dot_product_attention = _routed(_replaced)
        _inside += 1
    _switches.stack.append(switch)
    try:
        with _choice(choice):
            yield switch.shapes
    finally:
        _switches.stack.pop()
        with _lock:
            _inside -= 1
            if not _inside and jax.nn.dot_product_attention is _replacement:
                jax.nn.dot_product_attention = _replaced
    if switch.ran or choice in _ran:
        return
    reason = (
        "nothing called jax.nn.dot_product_attention by its full name inside. The model may write "
        "its attention out, or hold the function as `from jax.nn import dot_product_attention`. "
        "memeff.replace_attention reaches both."
    )
    if switch.called:
        reason = "every call of jax.nn.dot_product_attention inside raised an error."
    tell_nothing_switched(f"switch_jax_nn: memeff ran nothing, because {reason}", strict)


def tell_nothing_switched(reason: str, strict: bool) -> None:
    """Warn, or raise if `strict`."""
    if strict:
        raise ValueError(reason)
    warn(reason)


def _routed(replaced: Callable) -> Callable:
    """Return the function that stands in for `replaced`.

    It holds `replaced` itself, because other code may wrap it and keep it beyond the switch.
    """

    @functools.wraps(replaced)
    def route(*args, **kwargs):
        if _choice.value is None:  # outside, or in another thread
            return replaced(*args, **kwargs)
        return _as_jax_nn(*args, **kwargs)

    return route


def _as_jax_nn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Array | tuple[Array, Array]:
    """Compute a call of JAX's function with memeff, and return JAX's shapes and dtypes."""
    del implementation  # it chooses among JAX's implementations
    for switch in _switches.stack:
        switch.called = True
    choice: Choice = _choice.value
    shape = to_array("query", query).shape
    query = _at_least_3d("query", query)
    key = _at_least_3d("key", key)
    value = _at_least_3d("value", value)
    if bias is not None and to_array("bias", bias).dtype == bool:  # JAX adds it, as 0 and 1
        bias = jnp.asarray(bias, jnp.float32)
    shards = _shards_inside(choice.sequence, (query, key, value))
    run = functools.partial(
        dot_product_attention,
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=bool(is_causal),
        query_seq_lengths=_clip_lengths(query_seq_lengths, shards * query.shape[-3]),
        key_value_seq_lengths=_clip_lengths(key_value_seq_lengths, shards * key.shape[-3]),
        local_window_size=local_window_size,
        implementation=choice.implementation,
        **choice.sequence.keywords(),
    )
    if return_residual:
        out, residual = run(return_residual=True)
        residual = lax.stop_gradient(residual.astype(out.dtype))  # as JAX's
        result = out.reshape(*shape[:-1], out.shape[-1]), residual.reshape(shape[:-1])
    else:
        out = run()
        result = out.reshape(*shape[:-1], out.shape[-1])
    _ran.add(choice)
    _switches.stack[-1].shapes.append(shape)
    for switch in _switches.stack:
        switch.ran = True
    return result


def _shards_inside(options: SequenceOptions, arrays: tuple[Array, Array, Array]) -> int:
    """Return of how many parts of the sequence query, key and value hold one, inside shard_map."""
    axes = sharding.sequence_axes(options.sequence_axis, arrays[0])
    if not axes:
        return 1
    return find_sequence_mesh(axes, arrays).parts


def _at_least_3d(name: str, x: ArrayLike) -> Array:
    """Return x with leading dims of size 1, so that it has at least 3 dims."""
    x = to_array(name, x)
    return x.reshape((1,) * (3 - x.ndim) + x.shape)


def _clip_lengths(lengths: ArrayLike | None, size: int) -> ArrayLike | None:
    """Clip known lengths to 0 and `size`, as JAX does.

    `dot_product_attention` clips traced lengths itself, and refuses known ones.
    """
    if lengths is None or isinstance(lengths, Tracer) or not isinstance(size, int):
        return lengths
    return np.clip(np.asarray(lengths), 0, size)
