"""Define `merge`, which combines attention over parts of the keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from memeff.inputs import check_wide_floats, kind_of
from memeff.softmax import merge_rows


def merge(*parts: tuple[ArrayLike, ArrayLike]) -> tuple[Array, Array]:
    """Combine attention over parts of the keys into attention over all of them.

    Each part is what `dot_product_attention(..., return_residual=True)` returns for the same
    queries and some of the keys: a prefix that many sequences share, the keys of one device, what
    was kept elsewhere. The result is that of one call with all keys, up to rounding. Sums are
    float32 (float64 if any array is float64). Derivatives are exact, in both modes and of every
    order.

    Pass sinks [N] to no part, because lse does not include them. Multiply the merged out by
    `jax.nn.sigmoid(lse - sinks)[..., None]` instead.

    Memory: O(T), that of the results.

    Args:
      parts: one or more pairs (out [*B, T, N, D], lse [*B, T, N]), floats of the same shapes. lse
        is -inf for a row that sees none of the part's keys.

    Returns:
      out [*B, T, N, D] in the dtype of the parts' outs, and lse [*B, T, N] in float32 (float64 if
      any array is float64), in nats. A row that sees no key in any part gives 0 and -inf.

    Raises:
      ValueError: if there is no part, or shapes disagree.
      TypeError: if a part is no pair of floating-point arrays.

    Example:
      >>> x = jnp.ones((2, 8, 4, 16))
      >>> halves = (x[:, :5], x[:, 5:])
      >>> parts = [dot_product_attention(x, y, y, return_residual=True) for y in halves]
      >>> merge(*parts)[0].shape
      (2, 8, 4, 16)

    Source: Rabe & Staats 2021 (arXiv:2112.05682), section 2.
    """
    if not parts:
        raise ValueError("merge got no parts: pass at least one pair (out, lse).")
    outs, logs = [], []
    for n, part in enumerate(parts):
        out, lse = _check_part(n, part)
        outs.append(out)
        logs.append(lse)
    for n, (out, lse) in enumerate(zip(outs, logs, strict=True)):
        if out.shape != outs[0].shape or lse.shape != logs[0].shape:
            raise ValueError(
                f"part {n} of merge has out {out.shape} and lse {lse.shape}, and part 0 has "
                f"{outs[0].shape} and {logs[0].shape}: parts must be of the same queries."
            )
    dtypes = {out.dtype.name: out.dtype for out in outs}
    config: Any = jax.config
    if len(dtypes) > 1 and config.jax_numpy_dtype_promotion == "strict":
        raise TypeError(
            f"parts of merge have outs of {', '.join(dtypes)}, and jax_numpy_dtype_promotion is "
            '"strict": cast them to one dtype.'
        )
    is_wide = any(x.dtype == jnp.float64 for x in (*outs, *logs))
    dtype = jnp.float64 if is_wide else jnp.float32  # strict promotion would refuse result_type
    out, m, l = merge_rows(outs, [lse.astype(dtype) for lse in logs], [None] * len(logs))
    lse = jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1, l)))
    return out.astype(jnp.result_type(*outs)), lse


def _check_part(n: int, part) -> tuple[Array, Array]:
    """Return out and lse of part `n` as arrays."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        raise TypeError(
            f"part {n} of merge must be a pair (out, lse), as dot_product_attention(..., "
            f"return_residual=True) returns it; got {kind_of(part)}."
        )
    out = check_wide_floats(f"out of part {n}", part[0])
    lse = check_wide_floats(f"lse of part {n}", part[1])
    if out.ndim < 3:
        raise ValueError(
            f"out of part {n} must have shape [*B, T, N, D] with at least 3 dims; got {out.shape}."
        )
    if lse.shape != out.shape[:-1]:
        raise ValueError(
            f"lse of part {n} must have the shape of out without its last dim, "
            f"{out.shape[:-1]}; got {lse.shape}."
        )
    return out, lse
