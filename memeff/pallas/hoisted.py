"""A user's function of scalars taken apart: what XLA computes before a kernel, and what the kernel computes on its tiles.

The function's jaxpr, its calls inlined, is a list of steps. Each depends on some of score, batch, head, q_pos and k_pos:
  on batch and head at most: a number for each head, made before and read as a scalar
  besides on one of q_pos and k_pos: made on the tile if that is cheap, else before, as a vector that travels with its tokens
  besides on q_pos - k_pos alone: made on the tile if it can be, else before, for each head and each difference there is
  on others: made on the tile, if it is element-wise and Mosaic lowers it; nothing else can be
Nothing here knows of Mosaic. What the kernel computes is the same steps, bound to tiles in the place of scalars.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.functions import Given, Places
from memeff.pallas.steps import (
    CHEAP,
    CURVED,
    NUMBERS,
    Known,
    Program,
    Step,
    as_tile,
    is_bool,
    needed,
    program,
    run,
    run_on_tiles,
    unlowered,
)
from memeff.problem import Operands, Problem, among_keys

ARGUMENTS = "score", "batch", "head", "q_pos", "k_pos"
COMPARES = {"eq", "ge", "gt", "le", "lt", "ne"}
LINEAR = {"add", "broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape", "squeeze", "stop_gradient", "sub"}
MOST_VECTORS = 16  # numbers for tokens that travel with tiles: each takes 1 KiB of shared memory
MOST_DIFFERENCES = 4  # numbers for differences: of each a thread holds as many registers as half a tile
SIDE = 128  # tokens; all tiles' sides divide it
READS = {"dynamic_slice", "gather"}  # a number of an array


# ---- taken apart


class Numbers(NamedTuple):
    """What is made before: for each head B K G, for each query B T, for each key B S, for each head and difference of rows
    and columns B K G X (see `behind`); in float32 and int32.
    """

    of_heads: tuple[Any, ...] = ()
    of_queries: tuple[Any, ...] = ()
    of_keys: tuple[Any, ...] = ()
    of_differences: tuple[Any, ...] = ()


class Apart(NamedTuple):
    """A function taken apart."""

    whole: Program
    before: Numbers  # names
    moving: tuple[int, ...]  # names of those that are floats and made of params that are: they have gradients,
    walked: tuple[int, ...]  # of which the kernel for dq sums the cotangents, and of which it does not
    steps: tuple[Step, ...]  # of the tile
    reason: str | None  # why it cannot be; None: it can


def take_apart(name: str, given: Given, params: tuple[Array, ...]) -> Apart:
    """Of a function (`name`: score_fn or mask_fn) and all its params, floats in float32."""
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params]
    of_pair = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    arguments = ARGUMENTS if name == "score_fn" else ARGUMENTS[1:]
    score = [jax.ShapeDtypeStruct((), jnp.float32)] if name == "score_fn" else []

    def of_leaves(pair, leaves):
        return given.fn(*pair, jax.tree.unflatten(given.structure, leaves))

    whole = program(of_leaves, [*score, *of_pair], like)
    return _apart(name, whole, dict(zip(whole.inputs, arguments, strict=False)))


class _Facts(NamedTuple):
    """Of each name."""

    of: dict[int, frozenset[str]]  # on what it depends
    cheap: dict[int, bool]  # can it be made on a tile with no thought?
    can: dict[int, bool]  # or at all, of what is made before?
    moves: dict[int, bool]  # is it a float, made of params that are?
    fixed: dict[int, bool]  # is it made of numbers in the function's text alone? A compiler knows those.

    def before(self, x: int) -> bool:
        """Has it to be made before?"""
        side = _side(self.of[x])
        if self.can[x] and (self.fixed[x] or side == "of_differences"):
            return False
        return side == "of_heads" or side is not None and not self.cheap[x] and not ("head" in self.of[x] and self.can[x])


def _facts(whole: Program, arguments: dict[int, str]) -> _Facts:
    is_float = lambda x: jnp.issubdtype(whole.types[x].dtype, jnp.floating)
    of = {x: frozenset([arguments[x]] if x in arguments else []) for x in whole.inputs}
    cheap = {x: x in arguments for x in whole.inputs}
    can, moves = dict(cheap), {x: x not in arguments and is_float(x) for x in whole.inputs}
    fixed = dict.fromkeys(whole.inputs, False)
    slopes = {x: (int(arguments.get(x) == "q_pos"), int(arguments.get(x) == "k_pos")) for x in whole.inputs}
    for step in whole.steps:
        inputs = _names(step)
        depends = frozenset().union(*(of[x] for x in inputs))
        for x in step.outputs:
            if (found := _linear(step, whole.types, of, slopes)) is not None:
                slopes[x] = found
                if found[0] == -found[1] != 0:
                    depends = depends - {"q_pos", "k_pos"} | {"difference"}
        lowers, first = unlowered(step, whole.types) is None, _side(depends) == "of_heads"
        moving = step.primitive.name != "stop_gradient" and any(moves[x] for x in inputs)
        for x in step.outputs:
            of[x], fixed[x] = depends, all(fixed[y] for y in inputs)
            cheap[x] = first or lowers and step.primitive.name in CHEAP and all(cheap[y] for y in inputs)
            can[x] = first and not fixed[x] or lowers and all(can[y] or "head" not in of[y] for y in inputs)
            moves[x] = moving and is_float(x)
    return _Facts(of, cheap, can, moves, fixed)


def _linear(step: Step, types, of, slopes: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """How many times q_pos and k_pos the step's result is, or what it compares with 0, but for what depends on neither.

    None: not known.
    """
    names, name = _names(step), step.primitive.name
    known = all(x in slopes if of[x] & {"q_pos", "k_pos"} else _side(of[x]) == "of_heads" for x in names)
    dtypes = {jnp.dtype(types[x].dtype).name for x in (*names, *(step.outputs if name in LINEAR else ()))}
    exact = dtypes <= {"int32", "float32"}
    if name not in LINEAR | COMPARES or not (known and exact):
        return None
    parts = [(0, 0) if isinstance(x, Known) else slopes.get(x, (0, 0)) for x in step.inputs]
    signs = (-1,) if name == "neg" else (1, -1) if name in COMPARES | {"sub"} else (1,) * len(parts)
    q, k = (sum(sign * part[n] for sign, part in zip(signs, parts, strict=True)) for n in range(2))
    return q, k


def _names(step: Step) -> list[int]:
    return [x for x in step.inputs if not isinstance(x, Known)]


def _apart(name: str, whole: Program, arguments: dict[int, str]) -> Apart:
    facts = _facts(whole, arguments)
    wanted, tile, reason = {x for x in whole.outputs if not isinstance(x, Known)}, [], None
    for step in reversed(whole.steps):
        if wanted & set(step.outputs) and not any(map(facts.before, step.outputs)):
            tile.append(step)
            wanted |= set(_names(step))
            if (cannot := unlowered(step, whole.types)) is not None:
                what = "the score" if "score" in facts.of[step.outputs[0]] else "query and key positions together"
                reads = step.primitive.name in READS
                reason = f"read no array at {what}" if reads else f"cannot compute {cannot} of {what}"
                reason = f"its kernels {reason} ({name})"
    made: dict[str, list[int]] = {side: [] for side in Numbers._fields}
    for x in sorted(filter(facts.before, wanted)):
        side = _side(facts.of[x]) or ""
        made[side].append(x)
        reason = reason or _cannot_travel(name, side, whole.types[x], "head" in facts.of[x])
    numbers = Numbers(*map(tuple, made.values()))
    moves = lambda parts: tuple(x for x in sum(parts, ()) if name == "score_fn" and facts.moves[x])
    return Apart(whole, numbers, moves(numbers[:2]), moves(numbers[2:]), tuple(reversed(tile)), reason)


def _side(depends: frozenset[str]) -> str | None:
    """Of what there is a number for each; None: of pairs."""
    by = depends - {"batch", "head"}
    sides = {"q_pos": "of_queries", "k_pos": "of_keys", "difference": "of_differences"}
    return "of_heads" if not by else sides.get(next(iter(by))) if len(by) == 1 else None


def _cannot_travel(name: str, side: str, like, of_head: bool) -> str | None:
    tokens = {"of_queries": "query", "of_keys": "key"}.get(side)
    if like.shape != ():
        return f"its kernels read numbers, and {name} makes arrays of shape {like.shape} for a pair"
    if jnp.dtype(like.dtype).name not in NUMBERS | {"bool"}:
        return f"its kernels compute functions in float32 and int32, and {name} has {like.dtype}"
    if tokens and of_head:
        return f"its kernels read numbers of {name} for each {tokens}, and not for each {tokens} and head"
    return None


# ---- for a call


def why_not(problem: Problem, operands: Operands) -> str | None:
    """Why kernels cannot run the functions of this call; None: they can."""
    vectors = differences = 0
    for name, (given, params) in _functions(problem, operands).items():
        apart = take_apart(name, given, params)
        if apart.reason is not None:
            return apart.reason
        vectors += len(apart.before.of_queries) + len(apart.before.of_keys)
        differences += len(apart.before.of_differences)
        if name == "score_fn":
            slopes = _slopes(apart)
            for step in slopes.steps:
                if (cannot := unlowered(step, slopes.types)) is not None:
                    return f"its kernels cannot compute {cannot}, which the gradient of score_fn needs"
    if vectors > MOST_VECTORS:
        return f"its kernels have room for {MOST_VECTORS} numbers for each token, and these functions have {vectors}"
    if differences > MOST_DIFFERENCES:
        room = f"{MOST_DIFFERENCES} numbers for each difference of positions"
        return f"its kernels have room for {room}, and these functions have {differences}"
    return None


def counts(problem: Problem, operands: Operands) -> tuple[tuple[int, int], int, int]:
    """Of how many there is a number for each query, and for each key; for each difference and head; and how many sums of
    cotangents.
    """
    found = [take_apart(name, *of) for name, of in _functions(problem, operands).items()]
    total = lambda of: sum(map(of, found))
    of_tokens = total(lambda x: len(x.before.of_queries)), total(lambda x: len(x.before.of_keys))
    return of_tokens, total(lambda x: len(x.before.of_differences)), total(lambda x: len(x.moving))


def walks(problem: Problem, operands: Operands) -> bool:
    """Has score_fn numbers that move, and of which kernels do not sum the cotangents?"""
    given = _functions(problem, operands).get("score_fn")
    return given is not None and bool(take_apart("score_fn", *given).walked)


def _functions(problem: Problem, operands: Operands) -> dict[str, tuple[Given, tuple[Array, ...]]]:
    """{name: function and all its params}, floats in float32."""
    floats = sum(problem.mask_fn.floats) if problem.mask_fn is not None else 0
    masks = operands.mask_params[:floats], operands.mask_params[floats:]
    given = {
        "score_fn": (problem.score_fn, (operands.terms.score, operands.score_rest)),
        "mask_fn": (problem.mask_fn, masks),
    }
    found = {}
    for name, (fn, params) in given.items():
        if fn is not None:
            both = iter(params[0]), iter(params[1])
            leaves = (next(both[0 if is_float else 1]) for is_float in fn.floats)
            narrow = lambda x: _astype(x, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
            found[name] = fn, tuple(map(narrow, leaves))
    return found


def _astype(x, dtype):
    """Of arrays, and of their shapes."""
    return jax.ShapeDtypeStruct(x.shape, dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)


def numbers(problem: Problem, operands: Operands) -> Numbers:
    """What is made before, of both functions, that of score_fn first."""
    found = []
    for name, (given, params) in _functions(problem, operands).items():
        found.append(_numbers(take_apart(name, given, params), params, problem, operands))
    return Numbers(*(sum(x, ()) for x in zip(*found, strict=True))) if found else Numbers()


def of_score(problem: Problem, operands: Operands) -> tuple[Apart, Numbers]:
    """score_fn taken apart, and what is made before of it."""
    given, params = _functions(problem, operands)["score_fn"]
    apart = take_apart("score_fn", given, params)
    return apart, _numbers(apart, params, problem, operands)


def moving(problem: Problem, operands: Operands) -> tuple[Array, ...]:
    """Of those of score_fn, what has a gradient: in the order of `OnTiles.moving`, then what is `walked`."""
    apart, found = of_score(problem, operands)
    by_name: dict[int, Array] = dict(zip(sum(apart.before, ()), sum(found, ()), strict=True))
    return tuple(by_name[x] for x in (*apart.moving, *apart.walked))


def _numbers(apart: Apart, params, problem: Problem, operands: Operands) -> Numbers:
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    first = jnp.arange(max(B, K * G, T, S), dtype=jnp.int32)
    batch, head, each = first[:B], first[: K * G].reshape(K, G), jnp.zeros((B, 1), jnp.int32)
    offset = None if operands.q_offset is None else operands.q_offset[:, None]
    q_pos, k_pos = among_keys(problem, offset, first[None, :T]) + each, first[None, :S] + each
    differences = among_keys(problem, offset, jnp.arange(_up(T) + _up(S), dtype=jnp.int32) - behind(S))  # X, or B|1 X

    def made(names, batch, head, q_pos, k_pos):
        pair = dict(zip(ARGUMENTS[1:], (batch, head, q_pos, k_pos), strict=True))
        count = len(apart.whole.inputs) - len(params)
        env: dict[int, Any] = dict(zip(apart.whole.inputs[count:], params, strict=True))
        env |= {x: pair[at] for x, at in zip(apart.whole.inputs[:count], ARGUMENTS[-count:], strict=True) if at in pair}
        env = run(needed(apart.whole.steps, names), env)
        return tuple(_stored(env[x]) for x in names)

    none = jnp.int32(0)
    of_head = jax.vmap(jax.vmap(lambda b, n: made(apart.before.of_heads, b, n, none, none), (None, 0)), (None, 0))
    of_head = jax.vmap(of_head, (0, None))
    of_query = jax.vmap(jax.vmap(lambda b, i: made(apart.before.of_queries, b, none, i, none), (None, 0)))
    of_key = jax.vmap(jax.vmap(lambda b, j: made(apart.before.of_keys, b, none, none, j), (None, 0)))
    of_difference = jax.vmap(lambda b, n, x: made(apart.before.of_differences, b, n, x, none), (None, None, 0))
    of_difference = jax.vmap(jax.vmap(of_difference, (None, 0, None)), (None, 0, None))
    of_difference = jax.vmap(of_difference, (0, None, None if offset is None else 0))
    differences = differences if offset is None else differences + each
    return Numbers(
        of_head(batch, head), of_query(batch, q_pos), of_key(batch, k_pos), of_difference(batch, head, differences)
    )


def behind(S: int) -> int:
    """The index of 0 among the differences of rows and columns, which begin with the lowest that a tile has."""
    return _up(S) - 1


def _up(length: int) -> int:
    return -(-length // SIDE) * SIDE


def _stored(x: Array) -> Array:
    return x if x.dtype == jnp.float32 else x.astype(jnp.int32)


# ---- in the kernel


@dataclasses.dataclass(frozen=True, eq=False)
class OnTiles:
    """In the place of a `Given`: the same function, of tiles, by what was made before (`indices` of all that there is)."""

    apart: Apart
    indices: Numbers
    behind: int  # `behind(S)`
    slopes: Program | None = None  # value and derivatives; None: nobody wants those

    @property
    def moving(self) -> tuple[tuple[str, int], ...]:
        """What has a gradient: of which kind, and the how manyth of these."""
        of = {x: (side, i) for side in Numbers._fields for x, i in zip(*(getattr(y, side) for y in self._both), strict=True)}
        return tuple(of[x] for x in self.apart.moving)

    @property
    def _both(self):
        return self.apart.before, self.indices

    @property
    def curved(self) -> bool:
        """Does it compute what a kernel could compute roughly?"""
        steps = (*self.apart.steps, *(self.slopes.steps if self.slopes else ()))
        return any(step.primitive.name in CURVED | {"div"} for step in steps)

    def __call__(self, score: Array | None, at: Places, floats, rest) -> Array:
        """`rest`: all that was made before, `floats`: `moving` of those as tiles; positions of `at` are tiles."""
        names, shape = sum(self.apart.before, ()), at.q_pos.shape
        env = {x: loaded(y, self.apart.whole.types[x].dtype, shape) for x, y in zip(names, rest, strict=True)}
        env |= dict(zip(self.apart.moving, floats, strict=False))
        pair = [at.q_pos, at.k_pos] if score is None else [score, at.q_pos, at.k_pos]
        env |= dict(zip(of_pair(self.apart.whole, score is not None), pair, strict=True))
        if self.slopes is None:
            return result(self.apart, env, shape)
        return _by_slopes(self, env, shape)


def result(apart: Apart, env: dict[int, Array], shape, *alike: Callable) -> Array:
    """Of the steps of the tile."""
    env, (out,) = run_on_tiles(apart.steps, env, shape, *alike), apart.whole.outputs
    return as_tile(out.value, out.dtype, shape) if isinstance(out, Known) else env[out]


def of_pair(whole: Program, scored: bool) -> tuple[int, ...]:
    """Names of score (if there is one), q_pos and k_pos."""
    return (whole.inputs[0], *whole.inputs[3:5]) if scored else whole.inputs[2:4]


def loaded(x: Array, dtype, shape) -> Array:
    """A number, or a tile of them, as `_stored` has it, as a tile of `dtype`."""
    x = x if x.shape == shape else lax.broadcast(x, shape)
    return lax.ne(x, lax.full(shape, 0, x.dtype)) if is_bool(dtype) else lax.convert_element_type(x, dtype)


def _known(apart: Apart) -> tuple[int, ...]:
    """Names that the steps of the tile begin with, those of which there are derivatives first."""
    names = apart.whole.inputs[0], *apart.moving
    return *names, *(x for x in (*of_pair(apart.whole, True), *sum(apart.before, ())) if x not in names)


def _slopes(apart: Apart) -> Program:
    """Of the steps of the tile of a score: their value, and its derivative by the score and by what else moves.

    Taken of scalars, for what JAX makes of tiles Mosaic does not lower (sums of cotangents, `add_any`).
    """
    names = _known(apart)
    by = 1 + len(apart.moving)

    def value_and_slopes(*values):
        def value(*first):
            env, (out,) = run(apart.steps, dict(zip(names, (*first, *values[by:]), strict=True))), apart.whole.outputs
            return jnp.asarray(out.value, out.dtype) if isinstance(out, Known) else env[out]

        y, pull = jax.vjp(value, *values[:by])
        return y, *pull(jnp.ones_like(y))

    return program(value_and_slopes, *(jax.ShapeDtypeStruct((), apart.whole.types[x].dtype) for x in names))


def _by_slopes(function: OnTiles, env: dict[int, Array], shape) -> Array:
    names, slopes = _known(function.apart), function.slopes
    assert slopes is not None
    by = 1 + len(function.apart.moving)
    rest = [env[x] for x in names[by:]]  # no arguments of `value`: Mosaic lowers no tangents of integers

    def all_of(first):
        env = run_on_tiles(slopes.steps, dict(zip(slopes.inputs, (*first, *rest), strict=True)), shape)
        return [as_tile(x.value, x.dtype, shape) if isinstance(x, Known) else env[x] for x in slopes.outputs]

    @jax.custom_jvp
    def value(*first):
        return all_of(first)[0]

    @value.defjvp
    def _(primals, tangents):
        y, *of = all_of(primals)
        return y, functools.reduce(lax.add, (lax.mul(x, dx) for x, dx in zip(of, tangents, strict=True)))

    return value(*(env[x] for x in names[:by]))


def on_tiles(problem: Problem, operands: Operands, slopes: Literal["score", "all"] | None = None) -> Problem:
    """`problem` with its functions as kernels run them; with the score's derivative, by score alone or by params as well."""
    found, counts, none = {}, [0] * len(Numbers._fields), behind(operands.key.shape[1])
    for name, (given, params) in _functions(problem, operands).items():
        apart = take_apart(name, given, params)
        assert apart.reason is None
        indices = Numbers(*(tuple(range(n, n + len(x))) for n, x in zip(counts, apart.before, strict=True)))
        counts = [n + len(x) for n, x in zip(counts, apart.before, strict=True)]
        if name == "score_fn" and slopes is not None:
            apart = apart if slopes == "all" else apart._replace(moving=())
            found[name] = OnTiles(apart, indices, none, _slopes(apart))
        else:
            found[name] = OnTiles(apart._replace(moving=()), indices, none)
    return dataclasses.replace(problem, **found)
