"""memeff: exact attention for JAX in memory that grows with the sequence, not with its square."""

from memeff import masks, scores, transforms
from memeff.attention import attention_statistics, audit, dot_product_attention, explain, key_mass, plan
from memeff.auditing import Audit
from memeff.blocks import BlockMask, block_mask
from memeff.differentiation import RESIDUAL_NAMES
from memeff.dispatch import memory_limit
from memeff.functions import Mask, Score, Transform
from memeff.planning import Plan
from memeff.statistics import Statistics
from memeff.switch import switch_jax_nn
from memeff.version import __version__

__all__ = [
    "RESIDUAL_NAMES",
    "Audit",
    "BlockMask",
    "Mask",
    "Plan",
    "Score",
    "Statistics",
    "Transform",
    "__version__",
    "attention_statistics",
    "audit",
    "block_mask",
    "dot_product_attention",
    "explain",
    "key_mass",
    "masks",
    "memory_limit",
    "plan",
    "scores",
    "switch_jax_nn",
    "transforms",
]
