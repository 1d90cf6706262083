"""A decoder-only language model for long context. The file follows the data: tokens, layers, logits.

Pre-norm (RMSNorm), rotary positions (Su et al. 2021, arXiv:2104.09864), grouped heads (Ainslie et al. 2023,
arXiv:2305.13245), gated feed-forward (Shazeer 2020, arXiv:2002.05202). It uses Flax NNX rather than Linen, because the
model is then a plain object with its parameters as attributes, and stacking, scan and remat are plain JAX in this file.

Parameters are float32 and stacked over layers, whatever the options say, so that one checkpoint serves all of them.

Documents may be packed: tokens see their own document only, and positions start again at 0 in each document. Rotary
attention depends on distances alone, so the result is the same. But the angles stay small, and a packed document has
the numbers of the document by itself.
"""

import dataclasses
import functools
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

import memeff
import memeff.nn
from models.data import VOCABULARY, Refused

DEFAULT_INIT = nnx.initializers.lecun_normal()
# as Llama 3: slow enough that a turn takes longer than a context of 100,000 tokens
ROTARY_BASE = 500_000
SEQUENCE_AXIS = "seq"  # of the mesh, where several devices share each row


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's settings; `models.train` makes its flags of them."""

    layers: Annotated[int, "number of layers"] = 4
    width: Annotated[int, "size of a token's vector between layers"] = 128
    heads: Annotated[int, "query heads; the head size is width / heads"] = 4
    kv_heads: Annotated[int, "key/value heads, shared by heads / kv_heads query heads each"] = 2
    feed_forward: Annotated[int, "hidden width of the feed-forward part"] = 384
    window: Annotated[
        int | None, "see this many tokens back at most (default: the whole document)"
    ] = None
    attention: Annotated[Literal["memeff", "jax.nn", "reference"], "which attention to use"] = (
        "memeff"
    )
    dtype: Annotated[
        Literal["float32", "bfloat16"], "dtype of the computation; parameters are float32"
    ] = "float32"
    remat: Annotated[
        bool,
        "recompute each layer in the backward, except attention, instead of keeping its arrays",
    ] = False
    scan_layers: Annotated[
        bool, "compile one layer and loop over the layers, instead of compiling all"
    ] = True
    feed_forward_chunk: Annotated[
        int | None, "tokens of the feed-forward part that exist at a time (default: all)"
    ] = None
    devices: Annotated[int, "devices that share the tokens of each row"] = 1
    layout: Annotated[
        Literal["contiguous", "zigzag", "striped"] | None,
        "which tokens each of several devices has (default: zigzag, which gives all the same work)",
    ] = None

    def __post_init__(self):
        self.check_counts("layers", "width", "heads", "kv_heads", "feed_forward", "devices")
        if self.heads % self.kv_heads:
            raise Refused(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}.")
        if self.width % (2 * self.heads):
            raise Refused(
                f"width={self.width} must be a multiple of {2 * self.heads}, twice heads: rotary positions turn pairs."
            )
        if self.window is not None and not 0 <= self.window < 2**31:
            raise Refused(
                f"window={self.window} counts tokens and must be >= 0 and below 2**31; leave it out for the whole document."
            )
        if self.feed_forward_chunk is not None and self.feed_forward_chunk < 1:
            raise Refused(
                f"feed_forward_chunk={self.feed_forward_chunk} counts tokens and must be at least 1; leave it out for all."
            )
        if self.devices == 1 and self.layout is not None:
            raise Refused(
                f"layout={self.layout} shares a row among several devices: with devices=1 leave it out."
            )
        if self.devices > 1 and self.attention != "memeff":
            raise Refused(
                f"attention={self.attention} computes on one device: with devices={self.devices} use memeff."
            )
        if self.devices > 1 and self.window is not None and self.layout == "striped":
            raise Refused(
                f"layout=striped has no window={self.window}: use zigzag or contiguous, or leave window out."
            )

    def check_counts(self, *names: str) -> None:
        """Refuse settings that count something and are below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise Refused(f"{name}={getattr(self, name)}: it must be at least 1.")

    def sequence_keywords(self) -> dict[str, Any]:
        """Return the keywords of memeff for a row that several devices share; none for one device."""
        if self.devices == 1:
            return {}
        return {"sequence_axis": SEQUENCE_AXIS, "sequence_layout": self.layout or "zigzag"}

    def token_order(self, length: int) -> np.ndarray:
        """Return the positions in a row of the tokens [T] in the order in which the devices hold them."""
        if self.devices == 1:
            return np.arange(length, dtype=np.int32)
        return memeff.sequence_positions(length, self.devices, self.layout or "zigzag")


Caches = tuple[memeff.KVCache, ...]  # one for each layer


class Transformer(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            VOCABULARY, config.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def stacked(rngs):
            return Layer(config, rngs=rngs)

        self.layers = stacked(rngs)
        self.norm = norm(config, rngs)
        self.head = linear(config, config.width, VOCABULARY, rngs, nnx.initializers.normal(0.02))

    def __call__(
        self, tokens: Array, segment_ids: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Return logits [B, T, VOCABULARY] of the token after each of `tokens` [B, T]."""
        return self.head(self.hidden(tokens, segment_ids, positions))

    def hidden(
        self, tokens: Array, segment_ids: Array | None = None, positions: Array | None = None
    ) -> Array:
        """Return the vectors [B, T, C] before the head; `segment_ids` [B, T] count the documents.

        `positions` [B, T] are those in the document. They are needed where several devices hold the tokens in an order
        of their own, and computed otherwise.
        """
        if positions is None:
            positions = self.positions(tokens, segment_ids)
        turn = rotation(self.config, positions)
        layer_def, parameters = nnx.split(self.layers)

        def layer(x, parameters):
            module: Layer = nnx.merge(layer_def, parameters)
            q, k, v = module.project(x, turn)
            return module.combine(x, attend(self.config, q, k, v, segment_ids)), None

        if self.config.remat:
            keep = jax.checkpoint_policies.save_only_these_names(*memeff.RESIDUAL_NAMES)
            layer = jax.checkpoint(layer, policy=keep, prevent_cse=not self.config.scan_layers)
        x = self.vectors(tokens)
        x, _ = lax.scan(layer, x, parameters, unroll=not self.config.scan_layers)
        return self.norm(x)

    def vectors(self, tokens: Array) -> Array:
        """Return the vectors [B, T, C] of `tokens` [B, T].

        They are looked up in float32, because XLA adds up their gradient in the dtype of the table. In bfloat16 a sum of
        many tokens stands still: half of the gradient of 32,768 bytes of text was lost.
        """
        return self.embedding(tokens).astype(self.config.dtype)

    def losses(self, x: Array, targets: Array) -> Array:
        """Return the loss in nats [B, T] of predicting `targets` [B, T] from vectors [B, T, C], without logits."""
        return memeff.linear_cross_entropy(x, self.head.kernel[...].astype(x.dtype), targets)

    def predictions(self, x: Array) -> Array:
        """Return the likeliest token [B, T] after each of the vectors [B, T, C]."""
        chunk = self.config.feed_forward_chunk
        predict = functools.partial(likeliest, self.head)
        if chunk is None:
            return predict(x)[..., 0]
        return memeff.nn.blockwise(predict, x, chunk)[..., 0]

    def positions(self, tokens: Array, segment_ids: Array | None) -> Array:
        """Return the positions [B, T] of tokens that lie in their own order, on one device."""
        if self.config.devices > 1:
            raise ValueError(
                f"positions are missing. Over {self.config.devices} devices, give the position of each token."
            )
        if segment_ids is None:
            return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return positions_in_document(segment_ids)

    def decode(
        self, tokens: Array, caches: Caches, counts: Array | None = None
    ) -> tuple[Array, Caches]:
        """Return logits of `tokens` [B, T] that follow what `caches` hold, and the caches with them; one document per row.

        Of a row, only the first counts[b] tokens count. Layers are compiled one by one, so that each writes its cache in
        place. Their parameters may be unstacked, as `models.generate.decoding_params` returns them.
        """
        x, caches = self.decode_hidden(tokens, caches, counts)
        return self.head(x), caches

    def decode_hidden(
        self, tokens: Array, caches: Caches, counts: Array | None = None
    ) -> tuple[Array, Caches]:
        """Return the vectors [B, T, C] before the head, and the caches, as `decode` does."""
        turn = rotation(self.config, caches[0].lengths[:, None] + jnp.arange(tokens.shape[1]))
        layer_def, parameters = nnx.split(self.layers)
        x = self.vectors(tokens)
        appended = []
        for n, cache in enumerate(caches):
            layer_parameters = jax.tree.map(lambda p, n=n: p[n], parameters, is_leaf=is_unstacked)
            module: Layer = nnx.merge(layer_def, layer_parameters)
            q, k, v = module.project(x, turn)
            cache = cache.append(k, v, counts)
            x = module.combine(x, attend_cached(self.config, q, cache, counts))
            appended.append(cache)
        return self.norm(x), tuple(appended)

    def empty_cache(self, batch: int, size: int, chunk: int = 1) -> Caches:
        """Return caches with room for `size` tokens in each of `batch` rows, for calls of at most `chunk` tokens.

        With a window that is shorter, the caches are rings.
        """
        c = self.config
        window = c.window
        if window is not None and window + chunk < size:
            size = window + chunk
        else:
            window = None
        shape = batch, size, c.kv_heads, c.width // c.heads
        return tuple(
            memeff.KVCache.zeros(*shape, jnp.dtype(c.dtype), window=window) for _ in range(c.layers)
        )


def is_unstacked(parameter: Any) -> bool:
    """Return whether a parameter of the layers is a tuple with an array for each layer, not a stack."""
    return isinstance(parameter, tuple)


def likeliest(head: nnx.Linear, x: Array) -> Array:
    """Return the token [B, T, 1] with the largest logit, from vectors [B, T, C]."""
    return jnp.argmax(head(x), axis=-1, keepdims=True)


class Layer(nnx.Module):
    """Attention and feed-forward, each added to its input. The attention itself stands between `project` and `combine`."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        C, N, K, F = config.width, config.heads, config.kv_heads, config.feed_forward
        H = C // N
        # the sum of all stays near 1
        small = nnx.initializers.variance_scaling(0.5 / config.layers, "fan_in", "normal")
        self.attention_norm = norm(config, rngs)
        self.query = linear(config, C, N * H, rngs)
        self.key = linear(config, C, K * H, rngs)
        self.value = linear(config, C, K * H, rngs)
        self.out = linear(config, N * H, C, rngs, small)
        self.feed_norm = norm(config, rngs)
        self.gate = linear(config, C, F, rngs)
        self.up = linear(config, C, F, rngs)
        self.down = linear(config, F, C, rngs, small)
        self.head_dim = H
        self.feed_forward_chunk = config.feed_forward_chunk

    def project(self, x: Array, turn: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Return queries [B, T, N, H], keys and values [B, T, K, H] of `x` [B, T, C]; the first two are rotated."""
        x = self.attention_norm(x)
        q, k, v = (
            f(x).reshape(*x.shape[:2], -1, self.head_dim)
            for f in (self.query, self.key, self.value)
        )
        return rotate(q, *turn), rotate(k, *turn), v

    def combine(self, x: Array, attended: Array) -> Array:
        """Return the layer's result from its input `x` [B, T, C] and the attention's [B, T, N, H]."""
        x = x + self.out(attended.reshape(*x.shape[:2], -1))
        if self.feed_forward_chunk is None:
            return self.feed_forward(x)
        return memeff.nn.blockwise(self.feed_forward, x, self.feed_forward_chunk)

    def feed_forward(self, x: Array) -> Array:
        """Return `x` [B, T, C] and what the gated feed-forward part adds to it, token by token."""
        y = self.feed_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def attend(config: Config, q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
    """Return causal attention within documents and the window, as `config.attention` says, [B, T, N, H]."""
    window = None if config.window is None else (config.window, 0)
    if config.attention == "jax.nn":  # knows no segments: they cost a mask of T x T
        same = None
        if segment_ids is not None:
            same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]  # B 1 T T
        return jax.nn.dot_product_attention(
            q, k, v, mask=same, is_causal=True, local_window_size=window
        )
    return memeff.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        local_window_size=window,
        query_segment_ids=segment_ids,
        implementation="reference" if config.attention == "reference" else None,
        **config.sequence_keywords(),
    )


def attend_cached(config: Config, q: Array, cache: memeff.KVCache, counts: Array | None) -> Array:
    """Attend to a cache by memeff, whatever `attention` is, because all choices compute the same."""
    if config.window is None or cache.window is not None:  # a ring knows its window
        return cache.attend(q, counts=counts)
    return cache.attend(q, counts=counts, local_window_size=(config.window, 0))


def rotation(config: Config, positions: Array) -> tuple[Array, Array]:
    """Return cosines and sines of positions * base^(-2h/H), each [B, T, 1, H/2]; once for all layers."""
    half = config.width // config.heads // 2
    angle = positions[:, :, None, None] * ROTARY_BASE ** (-jnp.arange(half) / half)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x[h], x[h + H/2]) of `x` [B, T, N, H]."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def positions_in_document(segment_ids: Array) -> Array:
    """Return positions [B, T] that count from 0 at each place where `segment_ids` [B, T] changes."""
    column = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    starts = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    return column - lax.cummax(jnp.where(starts, column, 0), axis=1)


def norm(config: Config, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)


def linear(
    config: Config, inputs: int, outputs: int, rngs: nnx.Rngs, init=DEFAULT_INIT
) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, use_bias=False, dtype=jnp.dtype(config.dtype), kernel_init=init, rngs=rngs
    )
