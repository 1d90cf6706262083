"""Trace the user's functions of one query-key pair (or one row), and map them over tiles.

A function receives scalars, as the user writes it. It is mapped over those dims of a tile on
which it depends, so that a mask of positions alone is computed once for all heads.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from memeff.inputs import kind_of, to_array

ARGUMENTS = {
    "score_fn": ("score", "batch", "head", "q_pos", "k_pos", "params"),
    "mask_fn": ("batch", "head", "q_pos", "k_pos", "params"),
    "qk_transform": ("x", "position", "which", "params"),
}
COUNTED = {
    "B": "batch entries",
    "N": "heads",
    "T": "query positions",
    "Q": "query positions (q_offset + T)",
    "S": "key positions",
}


class PairIndices(NamedTuple):
    """Absolute indices (int32) of the pairs of a tile, and params that have no gradient."""

    batch: Array  # B
    head: Array  # K G
    q_pos: Array  # t, or B t
    k_pos: Array  # c
    score_params: tuple[Array, ...]
    mask_params: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class _WithParams:
    """A function and its params: a pytree whose leaves are those of the params."""

    fn: Callable[..., Any]
    params: Any = None

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("params"), self.params),), self.fn

    @classmethod
    def tree_unflatten(cls, fn, children):
        return cls(fn, *children)

    def _check_same_kind(self, other: Any) -> None:
        """Refuse to combine with what is of another kind."""
        kind = type(self).__name__
        if not isinstance(other, type(self)):
            raise TypeError(
                f"a memeff.{kind} combines with another memeff.{kind}, got {kind_of(other)}. Wrap "
                f"a function: memeff.{kind}(fn)."
            )


@jax.tree_util.register_pytree_with_keys_class
class Score(_WithParams):
    """A `score_fn` with its params: a pytree whose leaves are those of the params.

    Attributes:
      fn: a function (score, batch, head, q_pos, k_pos, params) -> score, of scalars.
      params: a pytree of arrays. Default: None.

    Example:
      >>> score = Score(lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j), jnp.ones(2))
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> memeff.dot_product_attention(x, x, x, score_fn=score).shape
      (1, 5, 2, 4)
    """

    def then(self, other: "Score") -> "Score":
        """Return the score that applies `other` to the result of this one."""
        self._check_same_kind(other)
        return Score(_Then(self.fn, other.fn), (self.params, other.params))


@jax.tree_util.register_pytree_with_keys_class
class Transform(_WithParams):
    """A `qk_transform` with its params: a pytree whose leaves are those of the params.

    Attributes:
      fn: a function (x, position, which, params) -> x of one row x [H] of queries or keys; `which`
        is "query" or "key".
      params: a pytree of arrays. Default: None.

    Example:
      >>> transform = Transform(lambda x, position, which, scale: x * scale, jnp.ones(4))
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> memeff.dot_product_attention(x, x, x, qk_transform=transform).shape
      (1, 5, 2, 4)
    """

    def then(self, other: "Transform") -> "Transform":
        """Return the transform that applies `other` to the result of this one."""
        self._check_same_kind(other)
        return Transform(_Then(self.fn, other.fn), (self.params, other.params))


@jax.tree_util.register_pytree_with_keys_class
class Mask(_WithParams):
    """A `mask_fn` with its params: a pytree whose leaves are those of the params.

    The operators `&`, `|` and `~` combine masks.

    Attributes:
      fn: a function (batch, head, q_pos, k_pos, params) -> bool, of scalars; True = may attend.
      params: a pytree of arrays. Default: None.

    Example:
      >>> mask = Mask(lambda b, h, i, j, widths: abs(i - j) <= widths[h], jnp.array([1, 3]))
      >>> x = jnp.ones((1, 5, 2, 4))
      >>> memeff.dot_product_attention(x, x, x, mask_fn=mask).shape
      (1, 5, 2, 4)
    """

    def __and__(self, other: "Mask") -> "Mask":
        return self._combine(operator.and_, other)

    def __or__(self, other: "Mask") -> "Mask":
        return self._combine(operator.or_, other)

    def _combine(self, combine: Callable[[Any, Any], Any], other: "Mask") -> "Mask":
        self._check_same_kind(other)
        return Mask(_Combined(combine, self.fn, other.fn), (self.params, other.params))

    def __invert__(self) -> "Mask":
        return Mask(_Not(self.fn), self.params)


@dataclasses.dataclass(frozen=True)
class _Then:
    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, score, *arguments):
        *indices, (first_params, second_params) = arguments
        score = self.first(score, *indices, first_params)
        return self.second(score, *indices, second_params)


@dataclasses.dataclass(frozen=True)
class _Combined:
    combine: Callable[[Any, Any], Any]  # operator.and_ or operator.or_
    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, *arguments):
        *indices, (first_params, second_params) = arguments
        return self.combine(
            self.first(*indices, first_params), self.second(*indices, second_params)
        )


@dataclasses.dataclass(frozen=True)
class _Not:
    fn: Callable[..., Any]

    def __call__(self, *arguments):
        return ~jnp.asarray(self.fn(*arguments))  # ~True is -2


def merge_leaves(is_float: Iterable[bool], floats: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """Return the leaves of params in their order, from the float leaves and the rest."""
    floats = iter(floats)
    rest = iter(rest)
    return [next(floats if flag else rest) for flag in is_float]


def _split_leaves(leaves, is_float) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return the float leaves and the rest."""
    floats = []
    rest = []
    for leaf, flag in zip(leaves, is_float, strict=True):
        (floats if flag else rest).append(leaf)
    return tuple(floats), tuple(rest)


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A checked `score_fn` or `mask_fn`: a static choice of a call, without its params."""

    fn: Callable[..., Any]
    structure: Any  # of params
    is_float: tuple[bool, ...]  # for each leaf of params: is it a float?
    uses: tuple[bool, ...]  # does it depend on batch, head, q_pos, k_pos?

    def __call__(self, score: Array | None, indices: PairIndices, floats, rest) -> Array:
        """Apply a score_fn to scores [B, K, G, t, c], or evaluate a mask_fn (`score` is None).

        A mask is [B|1, K|1, G|1, t|1, c|1]: a dim on which it does not depend has size 1.
        """
        leaves = merge_leaves(self.is_float, floats, rest)
        params = jax.tree.unflatten(self.structure, leaves)
        q_pos = _without_batch_of_one(indices.q_pos)
        q_dims = "bt" if q_pos.ndim == 2 else "t"
        arrays = []
        dims = []
        if score is not None:
            arrays.append(score)
            dims.append("bkgtc")
        index_arrays = (indices.batch, indices.head, q_pos, indices.k_pos)
        index_dims = ("b", "kg", q_dims, "c")
        for array, letters, used in zip(index_arrays, index_dims, self.uses, strict=True):
            arrays.append(array if used else jnp.int32(0))
            dims.append(letters if used else "")

        def of_pair(params, *arguments):
            return jnp.asarray(self.fn(*arguments, params))  # it may be Python's True

        mapped = of_pair
        # The innermost vmap is over c, so each vmap maps the first dim that is left.
        for letter in reversed("bkgtc"):
            axes = [0 if letter in letters else None for letters in dims]
            if 0 in axes:
                mapped = jax.vmap(mapped, (None, *axes))
            else:
                mapped = _with_leading_dim(mapped)
        mesh = jax.typeof(indices.batch).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            mapped = _shard_mapped(mapped, mesh, indices, dims)
        return mapped(params, *arrays)


def _shard_mapped(f: Callable, mesh: Any, indices: PairIndices, dims: Sequence[str]) -> Callable:
    """Return f under shard_map: gathers at sharded indices need an explicit output sharding."""
    batch_spec = jax.typeof(indices.batch).sharding.spec
    head_spec = jax.typeof(indices.head).sharding.spec
    axes = dict(zip("bkg", (*batch_spec, *head_spec), strict=True))
    in_specs = [PartitionSpec()]  # of params
    for letters in dims:
        in_specs.append(PartitionSpec(*map(axes.get, letters)))
    used = "".join(dims)
    out_axes = [axes.get(x) if x in used else None for x in "bkgtc"]
    out_spec = PartitionSpec(*out_axes)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_spec)
    replicated = NamedSharding(mesh, PartitionSpec())

    def call(params, *arrays):
        params = jax.tree.map(lambda x: reshard(x, replicated), params)
        return sharded(params, *arrays)

    return call


def _without_batch_of_one(position: Array) -> Array:
    """Return positions [1, t] as [t], and others unchanged."""
    if position.ndim == 2 and position.shape[0] == 1:
        return position[0]
    return position


def _with_leading_dim(f: Callable) -> Callable:
    """Return f with a dim of size 1 before the dims of its result."""

    def call(*arguments):
        return f(*arguments)[None]

    return call


@dataclasses.dataclass(frozen=True)
class TracedTransform:
    """A checked `qk_transform`: a static choice of a call, without its params."""

    fn: Callable[..., Any]
    structure: Any  # of params
    is_float: tuple[bool, ...]  # for each leaf of params: is it a float?

    def __call__(self, which: str, x: Array, position: Array, floats, rest) -> Array:
        """Transform rows x [B, K, (G,) t, H] at positions [t] or [B, t].

        In derivatives NaN and Inf of x count as 0, because a hidden row must not reach gradients.
        """

        @jax.custom_jvp
        def transform(x, floats, position, rest):
            return self._map_rows(which, x, position, floats, rest)

        @transform.defjvp
        def _(primals, tangents):
            x, floats, position, rest = primals

            def of_floats(x, floats):
                return self._map_rows(which, x, position, floats, rest)

            finite = jnp.where(jnp.isfinite(x), x, 0)
            _, tangent = jax.jvp(of_floats, (finite, floats), tangents[:2])
            return transform(*primals), tangent

        return transform(x, floats, position, rest)

    def _map_rows(self, which: str, x: Array, position: Array, floats, rest) -> Array:
        """Apply the function to each row of x."""
        leaves = merge_leaves(self.is_float, floats, rest)
        params = jax.tree.unflatten(self.structure, leaves)
        position = _without_batch_of_one(position)

        def of_row(row, position):
            return self.fn(row, position, which, params)

        mapped = jax.vmap(of_row)
        for _ in range(x.ndim - 3):
            mapped = jax.vmap(mapped, (0, None))
        position_axis = 0 if position.ndim == 2 else None
        mapped = jax.vmap(mapped, (0, position_axis))
        return mapped(x, position)


def check_pair_function(name: str, fn: Any, params: Any, sizes: dict[str, Any]) -> Any:
    """Return a `score_fn` or `mask_fn` as a Score or Mask, checked as by `trace_function`.

    Return None if there is none.
    """
    fn, params = _unwrap(name, fn, params, Score | Mask)
    if fn is None:
        return None
    check_sizes(name, fn, params, sizes)
    check_result(name, fn, params)
    return Score(fn, params) if name == "score_fn" else Mask(fn, params)


def trace_function(
    name: str,
    fn: Any,
    params: Any,
    dtype,
    sizes: dict[str, Any],
) -> tuple[TracedFunction, tuple[Array, ...], tuple[Array, ...]]:
    """Check a `score_fn` or `mask_fn`, and return it with its float params and its other params.

    Args:
      name: "score_fn" or "mask_fn".
      dtype: of the scores.
      sizes: the call's B, N, T and S, as far as they are known.
    """
    fn, params = _unwrap(name, fn, params, Score | Mask)
    check_sizes(name, fn, params, sizes)
    fn, leaves, structure, floats = check_result(name, fn, params)

    def call(arguments, leaves):
        return fn(*arguments, jax.tree.unflatten(structure, leaves))

    indices = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    if name == "score_fn":
        arguments = [jax.ShapeDtypeStruct((), dtype), *indices]
        result_dtype = jnp.dtype(dtype)
    else:
        arguments = indices
        result_dtype = jnp.dtype(bool)
    traced = _traced(name, call, arguments, leaves)
    results = traced.out_avals
    if not _is_one(results, (), result_dtype):
        raise TypeError(
            f"{name} is called with scalars, for one pair, and must return one {result_dtype}; "
            f"got {_describe(results)}."
        )
    uses = _uses(traced.jaxpr)[: len(arguments)]
    index_uses = tuple(uses[-4:])  # of batch, head, q_pos and k_pos
    function = TracedFunction(fn, structure, floats, index_uses)
    return function, *_split_leaves(leaves, floats)


def check_row_function(fn: Any, params: Any) -> None:
    """Check what a `qk_transform` takes."""
    check_result("qk_transform", *_unwrap("qk_transform", fn, params, Transform))


def trace_transform(
    fn: Any, params: Any, like: jax.ShapeDtypeStruct
) -> tuple[TracedTransform, tuple[Array, ...], tuple[Array, ...]]:
    """Check a `qk_transform` of rows like `like`, and return it with its float and other params."""
    fn, params = _unwrap("qk_transform", fn, params, Transform)
    fn, leaves, structure, floats = check_result("qk_transform", fn, params)
    arguments = [like, jax.ShapeDtypeStruct((), jnp.int32)]
    for which in ("query", "key"):

        def call(arguments, leaves, which=which):
            return fn(*arguments, which, jax.tree.unflatten(structure, leaves))

        results = _traced("qk_transform", call, arguments, leaves).out_avals
        if not _is_one(results, like.shape, like.dtype):
            raise TypeError(
                f"qk_transform must return a row like that of a {which}, "
                f"{like.dtype}{list(like.shape)}; got {_describe(results)}."
            )
    return TracedTransform(fn, structure, floats), *_split_leaves(leaves, floats)


def _is_one(results: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> bool:
    """Return True if `results` is one array of this shape and dtype."""
    if len(results) != 1:
        return False
    (x,) = results
    return x.shape == shape and x.dtype == dtype


def _unwrap(name: str, fn: Any, params: Any, kinds: Any) -> tuple[Any, Any]:
    """Return the function and the params of a Score, Mask or Transform; others unchanged."""
    if not isinstance(fn, kinds):
        if fn is None and params is not None:
            raise ValueError(f"{name.removesuffix('_fn')}_params came without {name}: pass both.")
        return fn, params
    if params is not None:
        raise ValueError(
            f"Pass either {name.removesuffix('_fn')}_params or a `memeff.{type(fn).__name__}`, "
            "which carries its own params, not both."
        )
    return fn.fn, fn.params


def _describe(results: Sequence[Any]) -> str:
    """Return dtypes and shapes in words for an error."""
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in results) or "nothing"


def with_sizes(sizes: Callable[[Any], dict[str, int]]) -> Callable[[Callable], Callable]:
    """Mark a function with the sizes (B, N, T, S) that its params are made for.

    Q is the size of params that are read at the positions of queries, which begin at q_offset.
    `check_sizes` compares these sizes with those of the call, because JAX reads the last entry of
    an array for an index beyond its end.
    """

    def mark(fn):
        fn.sizes = sizes
        return fn

    return mark


def check_sizes(name: str, fn: Any, params: Any, sizes: dict[str, Any]) -> None:
    """Refuse params for other heads or batch entries than the call's, or for fewer positions."""
    for letter, size in _sizes_of_params(fn, params):
        expected = sizes.get(letter)
        if not isinstance(expected, int):
            continue  # symbolic, or not known yet
        fits = size >= expected if letter in "TQS" else size == expected
        if not fits:
            raise ValueError(
                f"{name} has params for {letter}={size} {COUNTED[letter]}, "
                f"but this call has {letter}={expected}."
            )


def positions_held(fn: Any, params: Any, letters: str = "QS") -> int | None:
    """Return for how many positions the params of a ready-made function are, or None for any.

    `letters` are Q for positions of queries, and S for those of keys.
    """
    if isinstance(fn, Score | Mask):
        fn, params = fn.fn, fn.params
    sizes = _sizes_of_params(fn, params)
    return min((n for letter, n in sizes if letter in letters), default=None)


def _sizes_of_params(fn: Any, params: Any) -> Iterator[tuple[str, int]]:
    """Yield the sizes that the params of a function, and of its parts, are made for."""
    if isinstance(fn, _Then | _Combined):
        for part, part_params in zip((fn.first, fn.second), params, strict=True):
            yield from _sizes_of_params(part, part_params)
    elif isinstance(fn, _Not):
        yield from _sizes_of_params(fn.fn, params)
    elif hasattr(fn, "sizes"):
        yield from fn.sizes(params).items()


def check_result(name: str, fn: Any, params: Any) -> tuple[Any, list[Array], Any, tuple[bool, ...]]:
    """Check what a function takes; return it with leaves, structure and floats of its params."""
    arguments = ARGUMENTS[name]
    names = ", ".join(arguments)
    if not callable(fn):
        raise TypeError(f"{name} must be a function ({names}), got {kind_of(fn)}.")
    try:
        hash(fn)
        inspect.signature(fn).bind(*arguments)
    except (TypeError, ValueError) as e:  # a builtin function has no signature
        raise TypeError(f"{name} must be hashable and take ({names}): {e}.") from None
    leaf = f"each leaf of {name.removesuffix('_fn')}_params"
    params = jax.tree.map(functools.partial(to_array, leaf), params)
    if any(_is_complex(x) for x in jax.tree.leaves(params)):
        fn = _WithComplexParams(fn)
        params = jax.tree.map(lambda x: _Parts(x.real, x.imag) if _is_complex(x) else x, params)
    leaves, structure = jax.tree.flatten(params)
    floats = tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)
    return fn, leaves, structure, floats


class _Parts(NamedTuple):
    """A complex array as two arrays of floats, which have gradients as all floats have."""

    real: Array
    imag: Array


def _is_complex(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _is_parts(x: Any) -> bool:
    return isinstance(x, _Parts)


@dataclasses.dataclass(frozen=True)
class _WithComplexParams:
    """A function of complex params that receives them as their parts."""

    fn: Callable[..., Any]

    def __call__(self, *arguments):
        def join(x):
            return lax.complex(*x) if _is_parts(x) else x

        *arguments, params = arguments
        return self.fn(*arguments, jax.tree.map(join, params, is_leaf=_is_parts))


def _traced(name: str, f: Callable, arguments: Sequence[Any], leaves: Sequence[Any]):
    """Return the jaxpr of f; refuse branches on traced values and closed-over tracers."""
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    try:
        traced = jax.make_jaxpr(f)(arguments, like)
    except jax.errors.ConcretizationTypeError as e:
        first_sentence = str(e).split(".")[0] + "."
        raise TypeError(
            f"{name} needs the value of a traced array: use jnp.where instead of if. "
            f"{first_sentence}"
        ) from e
    for x in traced.consts:
        if isinstance(x, Tracer):
            params = name.removesuffix("_fn") + "_params"
            raise ValueError(
                f"{name} closes over a traced array of shape {x.shape}: pass it in {params}."
            )
    return traced


def _uses(jaxpr) -> list[bool]:
    """Return, for each argument, whether the results depend on it."""
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return [x in needed for x in jaxpr.invars]
