"""What XLA says of a call: its temporary bytes, once it has compiled it. Hides how a call is compiled inside another trace.

Nothing is run or allocated. A call is compiled alone, for one device, from the shapes and dtypes of its arrays. Its figures
are kept for the next call that is like it.
"""

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memeff.arguments import Arguments
from memeff.device import Device

NO_GRADIENT = ("mask", "mask_fn", "mask_params")  # by these arguments nobody differentiates
KEPT = 4096  # figures


class SplitArguments(NamedTuple):
    """Arguments by name, taken apart."""

    floats: list[Any]  # arrays by which a gradient is taken
    rest: list[Any]  # other arrays
    # the arguments, with these in the place of those
    join: Callable[[list[Any], list[Any]], Arguments]
    names: tuple[str, ...]  # where each array was


def split_arguments(arguments: Arguments) -> SplitArguments:
    """Take arguments apart into arrays (any `jax.ShapeDtypeStruct` as well) and what is fixed while tracing."""
    found, tree = jax.tree.flatten_with_path(arguments._asdict())
    kinds = [_kind(path[0].key, x) for path, x in found]
    of = lambda kind: [x for (_, x), other in zip(found, kinds, strict=True) if other == kind]
    fixed = of("fixed")

    def join(floats, rest):
        put = {"floats": iter(floats), "rest": iter(rest), "fixed": iter(fixed)}
        return Arguments(**jax.tree.unflatten(tree, [next(put[kind]) for kind in kinds]))

    names = tuple(
        jax.tree_util.keystr(path)
        for (path, _), kind in zip(found, kinds, strict=True)
        if kind != "fixed"
    )
    return SplitArguments(of("floats"), of("rest"), join, names)


def _kind(name: str, x: Any) -> str:
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return "fixed"
    return "floats" if jnp.issubdtype(x.dtype, jnp.floating) and name not in NO_GRADIENT else "rest"


def local_device_like(device: Device) -> Any:
    """Return a device of this kind for which this process can compile, or None."""
    candidates = jax.local_devices()
    if device.platform == "cpu" and candidates[0].platform != "cpu":
        candidates = jax.local_devices(backend="cpu")
    like = (
        x
        for x in candidates
        if Device(x.platform, getattr(x, "compute_capability", None)) == device
    )
    return next(like, None)


def temp_bytes(
    run: Callable[..., Any], arguments: Arguments, chosen: Any, device: Any
) -> tuple[int, int]:
    """Return temporary bytes of the forward, and of forward and gradient in one program, as XLA reports them.

    Args:
      run: the function of `arguments` and `chosen` that runs the call.
      arguments: those of the call.
      chosen: the `dispatch.Chosen` in which it is done.
      device: on which. One that is described and not here will do, where JAX can compile for it.

    The gradient is by everything that is a float, its cotangents are inputs. Of the programs that return it with the
    forward's results and without them, the larger counts.
    """
    floats, rest, join, names = split_arguments(arguments)
    shapes = tuple((x.shape, x.dtype) for x in (*floats, *rest))
    config = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore
    key = run, chosen, names, shapes, arguments.return_residual, device, config
    if key not in _kept:
        if len(_kept) >= KEPT:
            _kept.clear()
        _kept[key] = _call_in_thread(
            _compiled, lambda floats, rest: run(join(floats, rest), chosen), floats, rest, device
        )
    return _kept[key]


_kept: dict[Any, tuple[int, int]] = {}


def _call_in_thread(f: Callable[..., Any], *args: Any) -> Any:
    """Return f(*args), called in a thread of its own: JAX's traces, meshes and mapped axes stay in the caller's."""
    x64, precision = jax.config.jax_enable_x64, jax.config.jax_default_matmul_precision  # type: ignore

    def call():
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            return f(*args)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, call).result()


def _compiled(
    forward: Callable[..., Any], floats: list[Any], rest: list[Any], device: Any
) -> tuple[int, int]:
    sharding = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    like = functools.partial(
        jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    )

    def both(floats, rest, cotangents):
        found, pull = jax.vjp(lambda floats: forward(floats, rest), floats)
        return found, pull(cotangents)

    # LLVM's optimisations change no buffer and take most of the time.
    options: Any = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else {}

    def bytes_of(function, *shapes):
        program: Any = jax.jit(function).lower(*shapes).compile(compiler_options=options)
        return program.memory_analysis().temp_size_in_bytes

    floats, rest = like((floats, rest))
    cotangents = like(jax.eval_shape(forward, floats, rest))
    gradients = (bytes_of(f, floats, rest, cotangents) for f in (both, lambda *x: both(*x)[1]))
    return bytes_of(forward, floats, rest), max(gradients)
