"""The functions of the chunked implementation, in plain JAX, and what it does in words."""

import dataclasses
import math

from memeff.chunked.backward import backward, logit_param_gradients
from memeff.chunked.eligible import fixed_max_applies, uses_gpu_fusion
from memeff.chunked.forward import forward
from memeff.chunked.schedule import count_tiles, tile_groups
from memeff.chunked.tangent import tangent
from memeff.problem import Operands, Problem

__all__ = ["backward", "describe", "forward", "logit_param_gradients", "tangent"]


def describe(problem: Problem, operands: Operands) -> str:
    """The walk in words."""
    fixed = fixed_max_applies(problem, operands)
    walks = {"": problem.fixed_chunk_size if fixed else None, "in the gradient ": None}
    if uses_gpu_fusion(problem, operands):
        walks["in the gradient "] = problem.fused_chunk_size
    told = {}
    for along, (name, special) in zip((1, 0), walks.items(), strict=True):
        t, c = special or problem.chunk_size
        this = dataclasses.replace(problem, chunk_size=(t, c))
        visited, total = count_tiles(this, operands)
        those = f"tiles of {t} x {c} logits, visited between bounds that are found as it runs"
        if visited is not None:
            those = f"tiles of {t} x {c} logits, {visited} of {total} visited"
            sizes = [
                size[1:] for size, _ in tile_groups(this, operands, along if special else None)
            ]
            rows, cols = max(sizes, key=math.prod, default=(t, c))
            those += f", joined to {rows} x {cols}" if rows * cols > t * c else ""
        told.setdefault(those, name)
    B, _, K, G, _ = operands.query.shape
    b, k = problem.block or (B, K)
    form = "a fixed row reference, checked" if fixed else "a running maximum"
    walk = "; ".join(name + those for those, name in told.items())
    return f"{walk}; {b * k * G} of {B * K * G} heads at a time; softmax with {form}"
