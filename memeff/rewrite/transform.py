"""Define `replace_attention` and `find_attention`, the public functions."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from memeff.inputs import check_bool, kind_of, text_of
from memeff.rewrite.check import Recorder
from memeff.rewrite.evaluate import evaluate
from memeff.rewrite.report import Report, make_report
from memeff.rewrite.scope import Record, Scope, Search

# Logits of so few pairs take 64 KiB for each head in float32, less than one tile of 512 x 512.
MIN_LOGITS = 128 * 128
_OF_ARRAYS = inspect.Signature([inspect.Parameter("arrays", inspect.Parameter.VAR_POSITIONAL)])


def replace_attention(
    f: Callable[..., Any],
    *,
    strict: bool = False,
    check: bool = False,
    min_logits: int = MIN_LOGITS,
) -> Callable[..., Any]:
    """Return f with the attention that it writes out computed by `memeff.dot_product_attention`.

    f may call any library. It is traced as by `jax.jit`. If only element-wise operations and a
    softmax lie between two products, one call of memeff takes their place. That works for any order
    of axes and at any depth: in `jit`, `vmap`, `scan`, loops, branches, `remat` and `shard_map`. A
    sum or difference of softmaxes, as in differential attention, becomes one call for each softmax.
    Scale, soft cap, causal order, windows, segments, masks, biases, sinks and dropout become
    arguments of the call. Other operations become a `score_fn` or a `mask_fn`.

    The result is the same function up to rounding, with derivatives of every order. What cannot be
    proved equal is left as it is; `memeff.find_attention` says where and why. In particular:

    * A row that sees no key keeps its meaning. A mask that replaces logits by a finite number gives
      the mean of all values there.
    * A logit of -6e8 or less (float16: -6e4) is taken to hide its key, if the row sees other keys:
      its exp is 0 beside any logit of a model.
    * If the program subtracts no maximum, and its exp overflows or underflows, memeff's does not.
      NaN and Inf that no query sees do not reach the result.

    Memory: O(T + S) for each attention that is replaced, forward and gradient. A T x S mask or bias
    of the program stays, unless the program computes it, element by element, from positions or
    smaller arrays.

    Differentiate the new function: `jax.grad(replace_attention(f))`. A gradient inside f needs the
    probabilities, so `replace_attention(jax.grad(f))` raises an error.

    Args:
      f: a function of pytrees. Arrays are traced. Other leaves, such as numbers, bools and strings
        of Python, are passed as they are, and f is traced again for new ones.
      strict: raise an error if nothing is replaced.
      check: at each call of the new function, run it once more and check the numbers of each place
        (in a loop, of its first run). `memeff.audit` compares sampled rows and columns, forward and
        gradient, with float64. Sampled rows of the output are also compared with the program's own
        equations. Each sample takes O(T + S), so the check works where the original cannot run.
        Dropout is left out of the comparison. The check does not run inside jit.
      min_logits: leave attention with a smaller T x S as it is, because there is little to gain.

    Returns:
      A function of the same arguments. It is jitted.

    Raises:
      ValueError: with `strict`, nothing was replaced. Or f itself takes a derivative of all the
        attention that was found.
      TypeError: `check` inside jit or grad. Or an argument is neither an array nor hashable.
      AssertionError: `check` found a difference. The error names the place.

    Example:
      >>> def attend(q, k, v):
      ...     logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 4
      ...     visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
      ...     weights = jax.nn.softmax(jnp.where(visible, logits, -1e9))
      ...     return jnp.einsum("bnts,bsnh->btnh", weights, v)
      >>> x = jnp.ones((1, 256, 2, 16))
      >>> replace_attention(attend, strict=True)(x, x, x).shape
      (1, 256, 2, 16)

    Source: the attention is that of `dot_product_attention`; the search is memeff's own.
    """
    _check_arguments("replace_attention", f, min_logits)
    check_bool("strict", strict)
    check_bool("check", check)

    @functools.partial(jax.jit, static_argnums=0)
    def run(static: _Static, arrays: list[Any]) -> Any:
        scope, structure = _search(f, static, arrays, min_logits)
        _refuse(scope, strict)
        return jax.tree.unflatten(structure, evaluate(scope, arrays))

    @functools.wraps(f)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        arrays, static = _split((args, kwargs))
        if check:
            if any(isinstance(x, Tracer) for x in arrays):
                raise TypeError(
                    "check=True compares numbers, and the arguments are traced: call the function "
                    "outside jit and grad, or omit check."
                )
            recorder = Recorder()
            scope, _ = _search(f, static, arrays, min_logits, recorder)
            jax.block_until_ready(jax.jit(functools.partial(evaluate, scope))(arrays))
            recorder.check()
        return run(static, arrays)

    return replaced


def find_attention(
    f: Callable[..., Any], *args: Any, min_logits: int = MIN_LOGITS, **kwargs: Any
) -> Report:
    """Return what `replace_attention` would replace in f, and what it would leave and why.

    Nothing is computed. Memory: none.

    Args:
      f: the function.
      args, kwargs: its arguments. An array may be a `jax.ShapeDtypeStruct`.
      min_logits: as in `replace_attention`.

    Returns:
      A report. Its `str` is a table of places with file and line. It says what was found, with the
      temporary bytes before and after that `memeff.plan` estimates; or why the place is left.

    Raises:
      TypeError: an argument is neither an array nor hashable.

    Example:
      >>> def attend(q, k, v):
      ...     return jax.nn.softmax(q @ k.T / 4) @ v
      >>> x = jax.ShapeDtypeStruct((512, 16), jnp.float32)
      >>> len(find_attention(attend, x, x, x).replaced)
      1
    """
    _check_arguments("find_attention", f, min_logits)
    arrays, static = _split((args, kwargs))
    scope, _ = _search(f, static, arrays, min_logits)
    return make_report(scope)


def _check_arguments(name: str, f: Any, min_logits: Any) -> None:
    if not callable(f):
        raise TypeError(f"{name} takes a function, got {kind_of(f)}.")
    is_number = isinstance(min_logits, numbers.Real) and not isinstance(min_logits, bool)
    if not is_number or min_logits != min_logits:  # NaN is not equal to itself
        raise TypeError(f"min_logits must be a number of pairs (T x S), got {text_of(min_logits)}.")


def _refuse(scope: Scope, strict: bool) -> None:
    """Raise if nothing is replaced and that is an error."""
    if scope.is_changed:
        return
    left = [x for part in scope.scopes for x in part.left]
    if any(x.has_derivative for x in left):
        raise ValueError(
            "replace_attention got a function that takes the derivative of its attention, which "
            "needs the probabilities. Differentiate the new function instead: write "
            "jax.grad(replace_attention(f)), not replace_attention(jax.grad(f))."
        )
    if strict:
        raise ValueError(f"replace_attention(strict=True) replaced nothing.\n{make_report(scope)}")


class _Static:
    """The arguments that are not arrays, and the structure of all arguments."""

    def __init__(self, structure: Any, leaves: tuple[Any, ...], is_array: tuple[bool, ...]):
        self.structure = structure
        self.leaves = leaves
        self.is_array = is_array
        kinds = tuple(type(x) for x in leaves)  # because 1 == True == 1.0
        signs = tuple(math.copysign(1, x) for x in leaves if isinstance(x, float))  # 0.0 == -0.0
        self._key = structure, leaves, kinds, signs, is_array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def bind(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return f as a function of the arrays alone."""

        def call(*arrays):
            parts = {True: iter(arrays), False: iter(self.leaves)}
            leaves = [next(parts[flag]) for flag in self.is_array]
            args, kwargs = jax.tree.unflatten(self.structure, leaves)
            return f(*args, **kwargs)

        vars(call).update(__wrapped__=f, __signature__=_OF_ARRAYS)  # JAX's errors name f
        return call


def _split(arguments: Any) -> tuple[list[Any], _Static]:
    """Separate arrays, which are traced, from other objects, which are not."""
    leaves, structure = jax.tree.flatten(arguments)
    kinds = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
    is_array = tuple(isinstance(x, kinds) for x in leaves)
    arrays = [x for x, flag in zip(leaves, is_array, strict=True) if flag]
    rest = tuple(x for x, flag in zip(leaves, is_array, strict=True) if not flag)
    try:
        hash(rest)
    except TypeError as e:
        raise TypeError(
            f"Arguments of a function with replaced attention must be arrays or hashable: {e}."
        ) from None
    return arrays, _Static(structure, rest, is_array)


def _search(
    f: Callable[..., Any],
    static: _Static,
    arrays: list[Any],
    min_logits: int,
    record: Record | None = None,
) -> tuple[Scope, Any]:
    """Trace f and search it. Return its scope and the structure of its results."""
    jaxpr, shapes = jax.make_jaxpr(static.bind(f), return_shape=True)(*arrays)
    return Search(jaxpr, min_logits, record).scope(jaxpr), jax.tree.structure(shapes)
