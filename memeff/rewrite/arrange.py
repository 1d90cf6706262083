"""Give arrays of the program the dims of memeff's arguments."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from memeff.rewrite.axes import (
    Element,
    Index,
    Letter,
    NoMatch,
    Slice,
    chain,
    count_positions,
    expand,
    is_cast,
    letters_in,
)
from memeff.rewrite.recipe import Arrangement
from memeff.rewrite.recognise import Operand


def arrange(index: Index, form: tuple[Any, ...], *, is_full: bool) -> Arrangement:
    """Return how an array, read at `index`, gets dims of the letters in `form`.

    A letter that the array lacks is broadcast. Without `is_full`, a dim of which the array has no
    letter has size 1.
    """
    slices = []
    split: list[Letter] = []
    for dim in index:
        if isinstance(dim, Slice):
            inner = dim.inner
            if isinstance(inner, Slice):
                raise NoMatch("a slice of a slice of a mask or a bias")
            count = count_positions(inner)
            slices.append((dim.start, dim.stride, count))
            split.extend(expand(inner))
        else:
            slices.append(None)
            split.extend(expand(dim))
    wanted = letters_in(form)
    if len(set(split)) != len(split) or not set(split) <= set(wanted):
        raise NoMatch("an array is read along axes that attention does not have")
    order = [split.index(x) for x in wanted if x in split]
    with_ones = []
    broadcast = []
    merged = []
    for dim in form:
        letters = expand(dim)
        keep = is_full or any(x in split for x in letters)
        for x in letters:
            with_ones.append(x.size if x in split else 1)
            broadcast.append(x.size if keep else 1)
        merged.append(count_positions(letters) if keep else 1)
    return Arrangement(
        tuple(slices),
        tuple(x.size for x in split),
        tuple(order),
        tuple(with_ones),
        tuple(broadcast),
        tuple(merged),
    )


def reduced(element: Element, form: tuple[Any, ...]) -> Element:
    """Return the smallest array of an element that depends on no letter but those in `form`.

    A dim of other letters is read at its first position, where a program has repeated an array and
    computed with it since.
    """
    value, index = smallest(element)
    wanted = set(letters_in(form))
    dims = []
    for dim, size in zip(index, value.shape, strict=True):
        letters = letters_in([dim])
        if letters and wanted.isdisjoint(letters):
            dim = Slice(_first_position(dim), 1, (), size)
        dims.append(dim)
    return value, tuple(dims)


def _first_position(dim: Any) -> int:
    return dim.start + dim.stride * _first_position(dim.inner) if isinstance(dim, Slice) else 0


def without_cast(operand: Operand, result_dtype: Any) -> Operand:
    """Return an operand as it was before a cast that lost nothing, if the result is as narrow."""
    value = operand.value
    if not is_cast(value) or value.maker is None:
        return operand
    narrow = value.maker.inputs[0]
    if narrow.dtype == result_dtype and jnp.promote_types(narrow.dtype, value.dtype) == value.dtype:
        return Operand(narrow, operand.index)
    return operand


def smallest(element: Element) -> Element:
    """Return the smallest array from which an element differs by moves alone."""
    candidates = []
    for value, index in chain(*element):
        if str(value.dtype) != str(element[0].dtype):
            break
        candidates.append((value, index))
    return min(candidates, key=lambda x: math.prod(x[0].shape))
