"""Recognise the keep-mask of dropout, whose bits memeff can draw again.

`jax.random.bernoulli` compares uniform numbers, made of the 23 upper bits of random words, with the
rate. memeff draws the same bits from the same key by the flat index of each pair.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from memeff.rewrite.axes import NoMatch, known_number, values_before
from memeff.rewrite.graph import Value
from memeff.rewrite.symbols import Formula, Leaf, Not

NEAR = 40  # values before a condition among which its random bits are sought
# From the comparison back to the bits: the operation, and the number that is its other operand.
_STEPS = (
    ("max", 0.0),
    ("add", 0.0),
    ("mul", 1.0),
    ("sub", 1.0),
    ("bitcast_convert_type", None),
    ("or", 0x3F800000),
    ("shift_right_logical", 9),
)
_COMMUTATIVE = ("max", "add", "mul", "or")


@dataclasses.dataclass(frozen=True)
class Bernoulli:
    """Booleans that `jax.random.bernoulli(key, keep_rate, shape)` draws."""

    key: Value
    keep_rate: float
    shape: tuple[int, ...]


def is_random(formula: Formula) -> bool:
    """Return True for a condition that is made of random bits."""
    formula = formula.part if isinstance(formula, Not) else formula
    if not isinstance(formula, Leaf):
        return False
    random = ("random_bits", "threefry2x32", "rng_bit_generator")
    return any(x.op in random for x in values_before(formula.element.value, NEAR))


def find_bernoulli(formula: Formula) -> Bernoulli:
    """Return how the keep-mask is drawn of which a formula is one element."""
    refuse = NoMatch("the keep-mask of its dropout is not one jax.random.bernoulli of float32")
    config: Any = jax.config
    if not isinstance(formula, Leaf):
        raise refuse
    value = formula.element.value
    if value.op != "lt" or value.maker is None or not config.jax_threefry_partitionable:
        raise refuse
    uniform, rate = value.maker.inputs
    keep_rate = known_number(rate)
    for name, number in _STEPS:
        if uniform.op != name or uniform.maker is None:
            raise refuse
        inputs = uniform.maker.inputs
        if name in _COMMUTATIVE and known_number(inputs[0]) is not None:
            inputs = inputs[::-1]
        if number is not None and known_number(inputs[1]) != number:
            raise refuse
        uniform = inputs[0]
    if uniform.op != "random_bits" or uniform.maker is None or keep_rate is None:
        raise refuse
    keep_rate = float(np.float32(keep_rate))
    if not 0 < keep_rate <= 1:
        raise NoMatch(f"dropout that keeps {keep_rate:g} of the probabilities")
    (key,) = uniform.maker.inputs
    if jax.dtypes.canonicalize_dtype(float) == np.float64:
        raise NoMatch(
            "dropout with the bits of float32 under x64, where memeff draws those of float64"
        )
    if key.shape != () or "fry" not in str(key.dtype) or uniform.maker.params["bit_width"] != 32:
        raise NoMatch("dropout with several keys, or with a key that is not threefry's")
    return Bernoulli(key, keep_rate, value.shape)
