"""Run the part of a user's function that a kernel computes on its tiles."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas.user_functions.jaxpr import (
    NONLINEAR,
    Const,
    FlatJaxpr,
    as_tile,
    flatten_jaxpr,
    is_bool,
    run_eqns,
    run_eqns_on_tiles,
)
from memeff.pallas.user_functions.partition import Numbers, PartitionedFunction
from memeff.user_functions import PairIndices


@dataclasses.dataclass(frozen=True, eq=False)
class TileFunction:
    """In the place of a `Given`: the same function, of tiles, by what was made before (`indices` of all that there is)."""

    apart: PartitionedFunction
    indices: Numbers
    behind: int  # `behind(S)`
    slopes: FlatJaxpr | None = None  # value and derivatives; None: nobody wants those

    @property
    def moving(self) -> tuple[tuple[str, int], ...]:
        """What has a gradient: of which kind, and the how manyth of these."""
        of = {
            x: (side, i)
            for side in Numbers._fields
            for x, i in zip(*(getattr(y, side) for y in self._both), strict=True)
        }
        return tuple(of[x] for x in self.apart.moving)

    @property
    def _both(self):
        return self.apart.before, self.indices

    @property
    def curved(self) -> bool:
        """Does it compute what a kernel could compute roughly?"""
        steps = (*self.apart.steps, *(self.slopes.steps if self.slopes else ()))
        return any(step.primitive.name in NONLINEAR | {"div"} for step in steps)

    def __call__(self, score: Array | None, at: PairIndices, floats, rest) -> Array:
        """`rest`: all that was made before, `floats`: `moving` of those as tiles; positions of `at` are tiles."""
        names, shape = sum(self.apart.before, ()), at.q_pos.shape
        env = {
            x: loaded(y, self.apart.whole.types[x].dtype, shape)
            for x, y in zip(names, rest, strict=True)
        }
        env |= dict(zip(self.apart.moving, floats, strict=False))
        pair = [at.q_pos, at.k_pos] if score is None else [score, at.q_pos, at.k_pos]
        env |= dict(zip(of_pair(self.apart.whole, score is not None), pair, strict=True))
        if self.slopes is None:
            return result(self.apart, env, shape)
        return by_slope_jaxpr(self, env, shape)


def result(apart: PartitionedFunction, env: dict[int, Array], shape, *alike: Callable) -> Array:
    """Of the steps of the tile."""
    env, (out,) = run_eqns_on_tiles(apart.steps, env, shape, *alike), apart.whole.outputs
    return as_tile(out.value, out.dtype, shape) if isinstance(out, Const) else env[out]


def of_pair(whole: FlatJaxpr, scored: bool) -> tuple[int, ...]:
    """Names of score (if there is one), q_pos and k_pos."""
    return (whole.inputs[0], *whole.inputs[3:5]) if scored else whole.inputs[2:4]


def loaded(x: Array, dtype, shape) -> Array:
    """A number, or a tile of them, as `_stored` has it, as a tile of `dtype`."""
    x = x if x.shape == shape else lax.broadcast(x, shape)
    return (
        lax.ne(x, lax.full(shape, 0, x.dtype))
        if is_bool(dtype)
        else lax.convert_element_type(x, dtype)
    )


def known_inputs(apart: PartitionedFunction) -> tuple[int, ...]:
    """Names that the steps of the tile begin with, those of which there are derivatives first."""
    names = apart.whole.inputs[0], *apart.moving
    return *names, *(
        x for x in (*of_pair(apart.whole, True), *sum(apart.before, ())) if x not in names
    )


def slope_jaxpr(apart: PartitionedFunction) -> FlatJaxpr:
    """Of the steps of the tile of a score: their value, and its derivative by the score and by what else moves.

    Taken of scalars, for what JAX makes of tiles Mosaic does not lower (sums of cotangents, `add_any`).
    """
    names = known_inputs(apart)
    by = 1 + len(apart.moving)

    def value_and_slopes(*values):
        def value(*first):
            env, (out,) = (
                run_eqns(apart.steps, dict(zip(names, (*first, *values[by:]), strict=True))),
                apart.whole.outputs,
            )
            return jnp.asarray(out.value, out.dtype) if isinstance(out, Const) else env[out]

        y, pull = jax.vjp(value, *values[:by])
        return y, *pull(jnp.ones_like(y))

    return flatten_jaxpr(
        value_and_slopes, *(jax.ShapeDtypeStruct((), apart.whole.types[x].dtype) for x in names)
    )


def by_slope_jaxpr(function: TileFunction, env: dict[int, Array], shape) -> Array:
    names, slopes = known_inputs(function.apart), function.slopes
    assert slopes is not None
    by = 1 + len(function.apart.moving)
    # no arguments of `value`: Mosaic lowers no tangents of integers
    rest = [env[x] for x in names[by:]]

    def all_of(first):
        env = run_eqns_on_tiles(
            slopes.steps, dict(zip(slopes.inputs, (*first, *rest), strict=True)), shape
        )
        return [
            as_tile(x.value, x.dtype, shape) if isinstance(x, Const) else env[x]
            for x in slopes.outputs
        ]

    @jax.custom_jvp
    def value(*first):
        return all_of(first)[0]

    @value.defjvp
    def _(primals, tangents):
        y, *of = all_of(primals)
        return y, functools.reduce(
            lax.add, (lax.mul(x, dx) for x, dx in zip(of, tangents, strict=True))
        )

    return value(*(env[x] for x in names[:by]))
