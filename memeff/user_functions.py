"""Scores and masks of the user's own: element-wise functions with arrays of their own. Hides how they meet a tile.

A function is called with scalars, as the user writes it, and mapped over the dims of a tile on which it depends: a mask that
looks at positions alone is computed once for all heads.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

ARGUMENTS = {
    "score_fn": ("score", "batch", "head", "q_pos", "k_pos", "params"),
    "mask_fn": ("batch", "head", "q_pos", "k_pos", "params"),
    "qk_transform": ("x", "position", "which", "params"),
}


class PairIndices(NamedTuple):
    """Where the pairs of a tile are, absolute numbers in int32, and the arrays of functions that have no gradient."""

    batch: Array  # B
    head: Array  # K G
    q_pos: Array  # t, or B t
    k_pos: Array  # c
    of_score: tuple[Array, ...]
    of_mask: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class _WithParams:
    fn: Callable[..., Any]
    params: Any = None

    def tree_flatten_with_keys(self):
        return ((jax.tree_util.GetAttrKey("params"), self.params),), self.fn

    @classmethod
    def tree_unflatten(cls, fn, children):
        return cls(fn, *children)


@jax.tree_util.register_pytree_with_keys_class
class Score(_WithParams):
    """A `score_fn` with its params; a pytree of those. `then` calls another one with the result."""

    def then(self, other: "Score") -> "Score":
        return Score(_Then(self.fn, other.fn), (self.params, other.params))


@jax.tree_util.register_pytree_with_keys_class
class Transform(_WithParams):
    """A `qk_transform` with its params; a pytree of those. `then` calls another one with the result."""

    def then(self, other: "Transform") -> "Transform":
        return Transform(_Then(self.fn, other.fn), (self.params, other.params))


@jax.tree_util.register_pytree_with_keys_class
class Mask(_WithParams):
    """A `mask_fn` with its params; a pytree of those. `&`, `|` and `~` make others of them."""

    def __and__(self, other: "Mask") -> "Mask":
        return Mask(_Both(self.fn, other.fn), (self.params, other.params))

    def __or__(self, other: "Mask") -> "Mask":
        return Mask(_Either(self.fn, other.fn), (self.params, other.params))

    def __invert__(self) -> "Mask":
        return Mask(_Not(self.fn), self.params)


@dataclasses.dataclass(frozen=True)
class _Then:
    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, score, *at):
        *places, params = at
        return self.second(self.first(score, *places, params[0]), *places, params[1])


@dataclasses.dataclass(frozen=True)
class _Both:
    first: Callable[..., Any]
    second: Callable[..., Any]

    def __call__(self, *at):
        *places, params = at
        return self.first(*places, params[0]) & self.second(*places, params[1])


@dataclasses.dataclass(frozen=True)
class _Either(_Both):
    def __call__(self, *at):
        *places, params = at
        return self.first(*places, params[0]) | self.second(*places, params[1])


@dataclasses.dataclass(frozen=True)
class _Not:
    fn: Callable[..., Any]

    def __call__(self, *at):
        return ~self.fn(*at)


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A function of the user's, of the leaves of its params, as a static choice of a call."""

    fn: Callable[..., Any]
    structure: Any  # of params
    floats: tuple[bool, ...]  # which of their leaves are floats
    uses: tuple[bool, ...]  # on which of batch, head, q_pos and k_pos it depends

    def __call__(self, score: Array | None, at: PairIndices, floats, rest) -> Array:
        """Of scores B K G t c the same of new ones; of None who may attend, B|1 K|1 G|1 t|1 c|1."""
        both = iter(floats), iter(rest)
        params = jax.tree.unflatten(
            self.structure, [next(both[0 if x else 1]) for x in self.floats]
        )
        at = at._replace(q_pos=_of_all(at.q_pos))
        dims = ["b", "kg", "bt" if at.q_pos.ndim == 2 else "t", "c"]
        given = [
            (x, d) if use else (jnp.int32(0), "")
            for x, d, use in zip(at[:4], dims, self.uses, strict=True)
        ]
        given = given if score is None else [(score, "bkgtc"), *given]
        run = lambda params, *x: self.fn(*x, params)
        # dims are in this order, so the one that is mapped is the first left
        for letter in reversed("bkgtc"):
            axes = tuple(0 if letter in d else None for _, d in given)
            run = jax.vmap(run, (None, *axes)) if 0 in axes else _with_one(run)
        arrays, dims = zip(*given, strict=True)
        mesh = jax.typeof(at.batch).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            run = _on_each_device(run, mesh, at, dims)
        return run(params, *arrays)


def _on_each_device(run: Callable, mesh: Any, at: PairIndices, dims: Sequence[str]) -> Callable:
    """On an Explicit mesh, `run` of what each device has: JAX wants to be told how what is read at sharded places lies."""
    axes = dict(
        zip(
            "bkg",
            (*jax.typeof(at.batch).sharding.spec, *jax.typeof(at.head).sharding.spec),
            strict=True,
        )
    )
    spec = lambda letters: PartitionSpec(*(axes.get(x) for x in letters))
    out = PartitionSpec(*(axes.get(x) if any(x in d for d in dims) else None for x in "bkgtc"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    whole = jax.shard_map(
        run, mesh=mesh, in_specs=(PartitionSpec(), *map(spec, dims)), out_specs=out
    )
    return lambda params, *arrays: whole(
        jax.tree.map(lambda x: reshard(x, everywhere), params), *arrays
    )


def _of_all(position: Array) -> Array:
    """B t as it is, 1 t as t."""
    return position[0] if position.ndim == 2 and position.shape[0] == 1 else position


def _with_one(f):
    return lambda *x: f(*x)[None]


@dataclasses.dataclass(frozen=True)
class TracedTransform:
    """The same of queries or keys, row by row."""

    fn: Callable[..., Any]
    structure: Any
    floats: tuple[bool, ...]

    def __call__(self, which: str, x: Array, position: Array, floats, rest) -> Array:
        """Of rows B K (G) t H, at positions t or B t."""
        both = iter(floats), iter(rest)
        params = jax.tree.unflatten(
            self.structure, [next(both[0 if x else 1]) for x in self.floats]
        )
        position = _of_all(position)
        run = jax.vmap(lambda x, position: self.fn(x, position, which, params))
        for _ in range(x.ndim - 3):
            run = jax.vmap(run, (0, None))
        return jax.vmap(run, (0, 0 if position.ndim == 2 else None))(x, position)


def trace_function(
    name: str, fn: Any, params: Any, dtype, here: dict[str, Any]
) -> tuple[TracedFunction, tuple[Array, ...], tuple[Array, ...]]:
    """The function, leaves of its params that are floats, and the others. Refuses what cannot be one.

    `dtype`: of scores; `here`: the call's sizes B, N, T and S, as far as they are known.
    """
    if isinstance(fn, Score | Mask):
        if params is not None:
            raise ValueError(
                f"{name.removesuffix('_fn')}_params came beside a {name} that has its own: leave them away."
            )
        fn, params = fn.fn, fn.params
    check_sizes(name, fn, params, here)
    fn, leaves, structure, floats = check_result(name, fn, params)
    score = [jax.ShapeDtypeStruct((), dtype)] if name == "score_fn" else []
    at = [*score, *[jax.ShapeDtypeStruct((), jnp.int32)] * 4]
    traced = _traced(
        name, lambda at, params: fn(*at, jax.tree.unflatten(structure, params)), at, leaves
    )
    wanted = jnp.dtype(dtype) if score else jnp.dtype(bool)
    found = traced.out_avals
    if len(found) != 1 or found[0].shape != () or found[0].dtype != wanted:
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in found) or "nothing"
        raise TypeError(
            f"{name} is called with scalars, for one pair, and must return one {wanted} then; got {got}."
        )
    uses = _uses(traced.jaxpr)[len(score) : len(at)]
    return TracedFunction(fn, structure, floats, tuple(uses)), *_split(leaves, floats)


def with_sizes(sizes: Callable[[Any], dict[str, int]]):
    """Marks a function whose params are numbers for so many heads (N), batch entries (B) or positions (T, S): beyond the end
    of an array JAX reads its last number, without a word.
    """

    def mark(fn):
        fn.sizes = sizes
        return fn

    return mark


def check_sizes(name: str, fn: Any, params: Any, here: dict[str, Any]) -> None:
    """Refuses params for other heads or batch entries, or for fewer positions, where the function knows."""
    if isinstance(fn, _Then | _Both):
        for part, of in zip((fn.first, fn.second), params, strict=True):
            check_sizes(name, part, of, here)
    elif isinstance(fn, _Not):
        check_sizes(name, fn.fn, params, here)
    for letter, size in getattr(fn, "sizes", lambda _: {})(params).items():
        wanted = here.get(letter)
        if isinstance(wanted, int) and (size < wanted if letter in "TS" else size != wanted):
            raise ValueError(
                f"{name} has numbers for {letter}={size}, and here {letter}={wanted}: give it as many."
            )


def check_result(name: str, fn: Any, params: Any):
    """The function, leaves of its params, their structure, and which are floats."""
    arguments = ARGUMENTS[name]
    if not callable(fn):
        raise TypeError(
            f"{name} must be a function ({', '.join(arguments)}), got {type(fn).__name__}."
        )
    try:
        hash(fn)
        inspect.signature(fn).bind(*arguments)
    except TypeError as e:
        raise TypeError(
            f"{name} must be hashable and take ({', '.join(arguments)}): {e}."
        ) from None
    params = jax.tree.map(jnp.asarray, params)
    if any(_is_complex(x) for x in jax.tree.leaves(params)):
        fn, params = _OfComplex(fn), jax.tree.map(_in_parts, params)
    leaves, structure = jax.tree.flatten(params)
    return fn, leaves, structure, tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)


class _Parts(NamedTuple):
    """A complex array as two of floats, which have gradients as all floats have."""

    real: Array
    imag: Array


def _is_complex(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _in_parts(x: Array) -> Array | _Parts:
    return _Parts(x.real, x.imag) if _is_complex(x) else x


@dataclasses.dataclass(frozen=True)
class _OfComplex:
    """A function whose params hold complex arrays, as a function of their parts."""

    fn: Callable[..., Any]

    def __call__(self, *args):
        def whole(x):
            return lax.complex(*x) if isinstance(x, _Parts) else x

        *others, params = args
        return self.fn(
            *others, jax.tree.map(whole, params, is_leaf=lambda x: isinstance(x, _Parts))
        )


def _split(leaves, floats) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    of = lambda which: tuple(
        x for x, is_float in zip(leaves, floats, strict=True) if is_float == which
    )
    return of(True), of(False)


def _traced(name: str, f, at, leaves):
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    try:
        traced = jax.make_jaxpr(f)(at, like)
    except jax.errors.ConcretizationTypeError as e:
        raise TypeError(
            f"{name} wants the value of what is known only when it runs: use jnp.where, not if. {_first(e)}"
        ) from e
    for x in traced.consts:
        if isinstance(x, Tracer):
            params = name.removesuffix("_fn") + "_params"
            raise ValueError(
                f"{name} closes over a traced array of shape {x.shape}: hand it over in {params}."
            )
    return traced


def trace_transform(fn: Any, params: Any, like: jax.ShapeDtypeStruct):
    """The same for `qk_transform`, of rows that are like that."""
    if isinstance(fn, Transform):
        if params is not None:
            raise ValueError(
                "qk_transform_params came beside a qk_transform that has its own: leave them away."
            )
        fn, params = fn.fn, fn.params
    fn, leaves, structure, floats = check_result("qk_transform", fn, params)
    for which in ("query", "key"):
        f = lambda at, params, which=which: fn(*at, which, jax.tree.unflatten(structure, params))
        found = _traced(
            "qk_transform", f, [like, jax.ShapeDtypeStruct((), jnp.int32)], leaves
        ).out_avals
        if len(found) != 1 or (found[0].shape, found[0].dtype) != (like.shape, like.dtype):
            got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in found) or "nothing"
            raise TypeError(
                f"qk_transform must return a row like that of a {which}, {like.dtype}{list(like.shape)}; got {got}."
            )
    return TracedTransform(fn, structure, floats), *_split(leaves, floats)


def _first(e: Exception) -> str:
    return str(e).split(".")[0] + "."


def _uses(jaxpr) -> list[bool]:
    """On which arguments the results depend."""
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if needed & set(eqn.outvars):
            needed |= {x for x in eqn.invars if not isinstance(x, Literal)}
    return [x in needed for x in jaxpr.invars]
