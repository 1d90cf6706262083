"""Compile a call inside the trace of another program, and read its temporary bytes from XLA.

Nothing is run or allocated. A call is compiled alone, for one device, from the shapes and dtypes of
its arrays. Its figures are kept for the next call with the same shapes and choices.
"""

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memeff.arguments import Arguments
from memeff.device import Device

NO_GRADIENT = ("mask", "mask_fn", "mask_params")  # arguments that have no gradient
MOST_KEPT = 4096  # figures


class SplitArguments(NamedTuple):
    """The arrays of named arguments, and a function that puts arrays in their places."""

    floats: list[Any]  # arrays that have a gradient
    rest: list[Any]  # other arrays
    join: Callable[[list[Any], list[Any]], Arguments]  # (floats, rest) -> arguments
    names: tuple[str, ...]  # path of each array in the arguments, in their order


def split_arguments(arguments: Arguments) -> SplitArguments:
    """Separate the arrays of named arguments, or their shapes, from what is fixed while tracing."""
    paths_and_leaves, structure = jax.tree.flatten_with_path(arguments._asdict())
    leaves: dict[str, list[Any]] = {"floats": [], "rest": [], "fixed": []}
    kinds = []
    names = []
    for path, leaf in paths_and_leaves:
        kind = _kind(path[0].key, leaf)
        leaves[kind].append(leaf)
        kinds.append(kind)
        if kind != "fixed":
            names.append(jax.tree_util.keystr(path))

    def join(floats, rest):
        parts = {"floats": iter(floats), "rest": iter(rest), "fixed": iter(leaves["fixed"])}
        joined = [next(parts[kind]) for kind in kinds]
        return Arguments(**jax.tree.unflatten(structure, joined))

    return SplitArguments(leaves["floats"], leaves["rest"], join, tuple(names))


def _kind(name: str, x: Any) -> str:
    """Return "floats", "rest" or "fixed" for a leaf of the argument `name`."""
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return "fixed"
    if name in NO_GRADIENT or not jnp.issubdtype(x.dtype, jnp.floating):
        return "rest"
    return "floats"


def local_device_like(device: Device) -> Any:
    """Return a device of this process that is of the same kind as `device`, or None."""
    candidates = jax.local_devices()
    if device.platform == "cpu" and candidates[0].platform != "cpu":
        candidates = jax.local_devices(backend="cpu")
    for candidate in candidates:
        capability = getattr(candidate, "compute_capability", None)
        if Device(candidate.platform, capability) == device:
            return candidate
    return None


def temp_bytes(
    run: Callable[..., Any], arguments: Arguments, chosen: Any, device: Any
) -> tuple[int, int]:
    """Return temporary bytes of the forward, and of forward and gradient together, from XLA.

    The gradient is by all floats, and its cotangents are inputs. It is compiled with the forward's
    results and without them; the larger figure counts.

    Args:
      run: computes attention from `arguments` and `chosen`.
      arguments: those of `dot_product_attention`.
      chosen: the `implementations.Chosen` to compile.
      device: a device, or the description of one for which JAX can compile.
    """
    floats, rest, join, names = split_arguments(arguments)
    shapes = tuple((x.shape, x.dtype) for x in (*floats, *rest))
    key = run, chosen, names, shapes, arguments.return_residual, device, _jax_settings()

    def forward(floats, rest):
        return run(join(floats, rest), chosen)

    if key not in _kept:
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = _call_in_thread(_compiled, forward, floats, rest, device)
    return _kept[key]


_kept: dict[Any, tuple[int, int]] = {}


def _call_in_thread(f: Callable[..., Any], *arguments: Any) -> Any:
    """Return f(*arguments), called in a thread that does not see the caller's traces and meshes."""
    x64, precision = _jax_settings()

    def call():
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            return f(*arguments)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, call).result()


def _jax_settings() -> tuple[bool, Any]:
    """Return the caller's settings of JAX that change a program: x64 and matmul precision."""
    config: Any = jax.config
    return config.jax_enable_x64, config.jax_default_matmul_precision


def _compiled(
    forward: Callable[..., Any], floats: list[Any], rest: list[Any], device: Any
) -> tuple[int, int]:
    """Compile forward and gradient for `device`, and return the temporary bytes of each."""
    sharding = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def forward_and_gradient(floats, rest, cotangents):
        results, pull = jax.vjp(lambda floats: forward(floats, rest), floats)
        return results, pull(cotangents)

    def gradient(floats, rest, cotangents):
        _, gradients = forward_and_gradient(floats, rest, cotangents)
        return gradients

    # LLVM's optimisations change no buffer and take most of the time.
    options: Any = {"xla_backend_optimization_level": 0} if device.platform == "cpu" else {}

    def temp_bytes_of(function, *shapes):
        lowered = jax.jit(function).lower(*shapes)
        program: Any = lowered.compile(compiler_options=options)
        return program.memory_analysis().temp_size_in_bytes

    floats, rest = jax.tree.map(on_device, (floats, rest))
    results = jax.eval_shape(forward, floats, rest)
    cotangents = jax.tree.map(on_device, results)
    forward_bytes = temp_bytes_of(forward, floats, rest)
    both_bytes = temp_bytes_of(forward_and_gradient, floats, rest, cotangents)
    gradient_bytes = temp_bytes_of(gradient, floats, rest, cotangents)
    return forward_bytes, max(both_bytes, gradient_bytes)
