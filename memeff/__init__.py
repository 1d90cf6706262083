"""memeff: exact attention for JAX in memory that grows with the sequence, not with its square."""

from memeff.attention import dot_product_attention, explain, plan
from memeff.differentiation import RESIDUAL_NAMES
from memeff.dispatch import memory_limit
from memeff.planning import Plan
from memeff.version import __version__

__all__ = ["RESIDUAL_NAMES", "Plan", "__version__", "dot_product_attention", "explain", "memory_limit", "plan"]
