"""Call the three kernels of JAX's splash attention, which has no public function for each.

Only this file knows their names and parameters. They are the same in jax 0.10.2, 0.11.2 and
0.12.0.1; `why_not` compares versions and parameters, so that another one is refused and not broken.

JAX's own masks are not used, because it computes T x S of each on the host. The kernels read tables
of visible blocks (tables.py) and a function of positions (masking.py) instead.

Source: jax/experimental/pallas/ops/tpu/splash_attention/splash_attention_kernel.py
"""

import contextlib
import contextvars
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memeff.pallas.tpu.tables import Visits

MODULE = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
VERSIONS = ((0, 10), (0, 11), (0, 12))  # with which the tests ran
HIDDEN_LOGIT = float(-0.7 * np.finfo(np.float32).max)  # of a hidden pair in the kernels

_LAYOUTS = ("q_layout", "k_layout", "v_layout")
_GRADIENT = ("q", "k", "v", "segment_ids", "sinks", "logsumexp", "do", "di", "bq", "bkv")
_MASKS = ("is_mqa", "mask_info", "mask_value", "attn_logits_soft_cap")
# The parameters of each function, in their order.
EXPECTED = {
    "_splash_attention_forward": (
        *("fwd_mask_info", "q", "k", "v", "segment_ids", "sinks", "mask_value", "is_mqa"),
        *("block_sizes", "residual_checkpoint_name", "save_residuals", "mask_function"),
        *("attn_logits_soft_cap", "interpret"),
    ),
    "_splash_attention_bwd_dq": (
        *(*_GRADIENT, *_MASKS, *_LAYOUTS),
        *("mask_function", "interpret"),
    ),
    "_splash_attention_bwd_dkv": (
        *(*_GRADIENT, "bkv_compute", *_MASKS, "use_fused_bwd_kernel", *_LAYOUTS),
        *("mask_function", "interpret"),
    ),
    "SegmentIds": ("q", "kv"),
}
_MASK_INFO = (
    *("data_next", "mask_next", "block_mask", "partial_mask_blocks", "q_sequence"),
    "is_dynamic_mask",
)

_interpreting: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "memeff_interprets_tpu_kernels", default=False
)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run the kernels that are traced inside this context in Pallas' interpreter, on any device."""
    token = _interpreting.set(True)
    try:
        yield
    finally:
        _interpreting.reset(token)


def interpreting() -> bool:
    """Return True inside `interpreted`."""
    return _interpreting.get()


@functools.cache
def why_not() -> str | None:
    """Return why this version of JAX does not have the kernels as expected; None if it does."""
    if jax.__version_info__[:2] not in VERSIONS:
        return (
            "the TPU kernels are those of JAX's splash attention in jax 0.10 to 0.12, and this is "
            f"jax {jax.__version__}"
        )
    try:
        kernels = importlib.import_module(MODULE)
    except ImportError:
        return f"the TPU kernels need JAX's splash attention, which jax {jax.__version__} lacks"
    names = {name: _parameters(getattr(kernels, name, None)) for name in EXPECTED}
    fields = _parameters(getattr(kernels, "mask_info_lib", None) and kernels.mask_info_lib.MaskInfo)
    if names != EXPECTED or fields != _MASK_INFO:
        return (
            "the TPU kernels need JAX's splash attention as jax 0.10 to 0.12 have it, and that of "
            f"jax {jax.__version__} has other parameters"
        )
    return None


def _parameters(function: Any) -> tuple[str, ...]:
    """Return the names of a function's parameters; none if there is no such function."""
    return () if function is None else tuple(inspect.signature(function).parameters)


class _ScaledLogits:
    """Stands in for the kernels' soft cap, so that they scale the logits, too.

    They compute tanh(raw / cap) * cap, and for the gradient ds (1 - d) (1 + d) with
    d = tanh(raw / cap). With a soft cap, raw / cap is scale * raw / cap here. Without one it is a
    constant for which 1 - d^2 is the scale, and the product with cap is scale * raw.
    """

    def __init__(self, scale: float, soft_cap: float | None):
        self.scale = scale  # in [1/2, 1)
        self.soft_cap = soft_cap
        self.raw: Any = None

    def __rtruediv__(self, raw: Array) -> Array:
        if self.soft_cap is not None:
            return raw * (self.scale / self.soft_cap)
        self.raw = raw
        return jnp.full_like(raw, math.atanh(math.sqrt(1 - self.scale)))

    def __rmul__(self, tanh: Array) -> Array:
        if self.soft_cap is not None:
            return tanh * self.soft_cap
        raw, self.raw = self.raw, None
        return raw * self.scale


class Kernels(NamedTuple):
    """The settings that the three kernels of one call share."""

    block: tuple[int, int]  # rows and columns of a tile
    visits: Visits  # blocks of keys that each block of queries visits
    positions: tuple[int, int] | None  # from and to which; None: no pair is hidden by position
    may_see: Callable[[Array, Array], Array] | None  # of positions of queries and keys
    scale: float  # of the logits, in [1/2, 1]
    soft_cap: float | None
    interpret: bool  # in Pallas' interpreter

    @property
    def gradient_scale(self) -> float:
        """The factor that dq and dk lack."""
        return 1.0 if self.soft_cap is None else self.scale

    def forward(self, arrays: tuple[Array, ...], segments: tuple, want_lse: bool):
        """Return out [B, N, T', D] and lse [B, N, T'], or None for lse unless wanted.

        `arrays` are query [B, N, T', H], key [B, K, S', H] and value [B, K, S', D], padded to
        whole tiles. `segments` [B, T'] and [B, S'] are int32, or None and None.
        """
        splash = importlib.import_module(MODULE)
        sizes = splash.BlockSizes(self.block[0], self.block[1], self.block[1])

        def call(query, key, value, q_segments, kv_segments):
            results = splash._splash_attention_forward(
                self._mask_info(splash),
                query,
                key,
                value,
                _segment_ids(splash, q_segments, kv_segments),
                None,
                mask_value=HIDDEN_LOGIT,
                is_mqa=False,
                block_sizes=sizes,
                residual_checkpoint_name=None,
                save_residuals=want_lse,
                mask_function=self.may_see,
                attn_logits_soft_cap=self._soft_cap(),
                interpret=self.interpret,
            )
            return (results[0], results[1][0]) if want_lse else (results, None)

        return jax.vmap(call)(*arrays, *segments)

    def query_gradient(self, arrays: tuple[Array, ...], segments: tuple) -> Array:
        """Return dq [B, N, T', H], but for the factor `gradient_scale`.

        `arrays` are query, key, value, lse [B, N, T'], dout [B, N, T', D] and delta [B, N, T'].
        """
        splash = importlib.import_module(MODULE)

        def call(*arrays):
            return splash._splash_attention_bwd_dq(
                *_gradient_arguments(splash, *arrays),
                mask_info=self._mask_info(splash),
                **self._gradient_options(splash),
            )

        return jax.vmap(call)(*arrays, *segments)

    def key_gradient(self, arrays: tuple[Array, ...], segments: tuple) -> tuple[Array, Array]:
        """Return dk [B, K, S', H], but for the factor `gradient_scale`, and dv [B, K, S', D].

        `arrays` are those of `query_gradient`.
        """
        splash = importlib.import_module(MODULE)

        def call(*arrays):
            _, dk, dv = splash._splash_attention_bwd_dkv(
                *_gradient_arguments(splash, *arrays),
                bkv_compute=self.block[1],
                mask_info=self._mask_info(splash, by_key=True),
                use_fused_bwd_kernel=False,
                **self._gradient_options(splash),
            )
            return dk, dv

        return jax.vmap(call)(*arrays, *segments)

    def _gradient_options(self, splash: Any) -> dict[str, Any]:
        """Return the named parameters that both kernels of the gradient have."""
        layout = splash.QKVLayout.HEAD_DIM_MINOR
        return dict(
            bq=self.block[0],
            bkv=self.block[1],
            is_mqa=False,
            mask_value=HIDDEN_LOGIT,
            attn_logits_soft_cap=self._soft_cap(),
            mask_function=self.may_see,
            interpret=self.interpret,
            **dict.fromkeys(_LAYOUTS, layout),
        )

    def _soft_cap(self) -> Any:
        """Return what the kernels take for a soft cap."""
        return self.soft_cap if self.scale == 1 else _ScaledLogits(self.scale, self.soft_cap)

    def _mask_info(self, splash: Any, by_key: bool = False) -> Any:
        """Return the tables and positions as the kernels take them."""
        visits = self.visits.mirrored() if by_key else self.visits
        table = visits.table(prefetch=not by_key)
        blocks = is_visible = None
        if table is not None:  # the kernel of keys wants the steps first
            blocks, is_visible = (x.T[None] if by_key else x[None] for x in table)
        positions = None if self.positions is None else jnp.arange(*self.positions, dtype=jnp.int32)
        return splash.mask_info_lib.MaskInfo(blocks, None, is_visible, None, positions)


def _gradient_arguments(
    splash: Any, query, key, value, lse, dout, delta, q_segments, kv_segments
) -> tuple[Any, ...]:
    """Return the arrays in the order in which both kernels of the gradient take them."""
    segments = _segment_ids(splash, q_segments, kv_segments)
    return query, key, value, segments, None, lse, dout, delta


def _segment_ids(splash: Any, q_segments: Array | None, kv_segments: Array | None) -> Any:
    """Return segment ids as the kernels take them."""
    return None if q_segments is None else splash.SegmentIds(q_segments, kv_segments)
