"""memeff: exact attention for JAX in memory that grows with the sequence, not with its square."""

from memeff import masks, scores, transforms
from memeff.attention import dot_product_attention
from memeff.attention_ad import RESIDUAL_NAMES
from memeff.block_mask import BlockMask, block_mask
from memeff.diagnostics.audit import Audit, audit
from memeff.diagnostics.plan import Plan, explain, plan
from memeff.diagnostics.statistics import Statistics, attention_statistics, key_mass
from memeff.linear_cross_entropy import linear_cross_entropy
from memeff.merge import merge
from memeff.rewrite.transform import find_attention, replace_attention
from memeff.sequence.layout import from_zigzag, sequence_positions, to_zigzag
from memeff.switch import switch_jax_nn
from memeff.tile_sizes import memory_limit
from memeff.user_functions import Mask, Score, Transform
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
    "find_attention",
    "from_zigzag",
    "key_mass",
    "linear_cross_entropy",
    "masks",
    "memory_limit",
    "merge",
    "plan",
    "replace_attention",
    "scores",
    "sequence_positions",
    "switch_jax_nn",
    "to_zigzag",
    "transforms",
]
