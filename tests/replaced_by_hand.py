"""Models as people write them without a library of attention; see replaced_models.py.

None of them knows memeff. Each is a function of (params, inputs), with attention written out in
the way of the model that it is named after.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 32
HEADS = 4
HEAD_SIZE = WIDTH // HEADS
VOCABULARY = 61


class Params:
    """Draw parameters one after the other, from one seed."""

    def __init__(self):
        self.rng = np.random.default_rng(1)

    def draw(self, *shape):
        """Return normal numbers of variance 1 / the first size, in float32 [*shape]."""
        scale = shape[0] ** -0.5
        return jnp.asarray(scale * self.rng.standard_normal(shape), jnp.float32)


def features(*shape, seed=0):
    """Return normal numbers in float32 [*shape]."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def token_ids(batch, length):
    """Return tokens of the vocabulary, int32 [batch, length]."""
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(1, VOCABULARY, (batch, length)), jnp.int32)


def normalise(x):
    """Return x with mean 0 and variance 1 over the last axis."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


# ---- nanoGPT: one projection to query, key and value; heads before time; a triangle of -inf


def nano_gpt(tokens):
    draw = Params().draw
    layers = []
    for _ in range(2):
        layers.append(
            {
                "qkv": draw(WIDTH, 3 * WIDTH),
                "out": draw(WIDTH, WIDTH),
                "up": draw(WIDTH, 4 * WIDTH),
                "down": draw(4 * WIDTH, WIDTH),
            }
        )
    params = {
        "layers": layers,
        "embedding": WIDTH**0.5 * draw(VOCABULARY, WIDTH),
        "positions": draw(tokens, WIDTH),
    }

    def attend(layer, x):
        batch, length, _ = x.shape
        parts = jnp.split(x @ layer["qkv"], 3, axis=-1)
        split = [part.reshape(batch, length, HEADS, HEAD_SIZE) for part in parts]
        q, k, v = (part.transpose(0, 2, 1, 3) for part in split)
        att = (q @ k.swapaxes(-2, -1)) * (1.0 / HEAD_SIZE**0.5)
        triangle = jnp.tril(jnp.ones((length, length))).reshape(1, 1, length, length)
        att = jnp.where(triangle == 0, -jnp.inf, att)
        att = jax.nn.softmax(att, axis=-1)
        y = (att @ v).transpose(0, 2, 1, 3).reshape(batch, length, WIDTH)
        return y @ layer["out"]

    def model(params, ids):
        x = params["embedding"][ids] + params["positions"][: ids.shape[1]]
        for layer in params["layers"]:
            x = x + attend(layer, normalise(x))
            x = x + jax.nn.gelu(normalise(x) @ layer["up"]) @ layer["down"]
        return normalise(x) @ params["embedding"].T

    return model, (params, token_ids(2, tokens))


# ---- AlphaFold: rows of an alignment, a bias of pairs, a gate, and a mask of +-1e9


def alphafold_rows(tokens):
    draw = Params().draw
    rows = 4
    pair_width = 3
    params = {
        "q": draw(WIDTH, HEADS, HEAD_SIZE),
        "k": draw(WIDTH, HEADS, HEAD_SIZE),
        "v": draw(WIDTH, HEADS, HEAD_SIZE),
        "gate": draw(WIDTH, HEADS, HEAD_SIZE),
        "gate_bias": jnp.ones((HEADS, HEAD_SIZE)),
        "pair": draw(pair_width, HEADS),
        "out": draw(HEADS, HEAD_SIZE, WIDTH),
    }

    def model(params, alignment, pair, mask):
        x = normalise(alignment)
        bias = 1e9 * (mask - 1.0)[:, None, None, :]
        pair_bias = jnp.einsum("qkc,ch->hqk", normalise(pair), params["pair"])
        q = jnp.einsum("bqa,ahc->bqhc", x, params["q"]) * HEAD_SIZE**-0.5
        k = jnp.einsum("bka,ahc->bkhc", x, params["k"])
        v = jnp.einsum("bka,ahc->bkhc", x, params["v"])
        logits = jnp.einsum("bqhc,bkhc->bhqk", q, k) + bias
        logits = logits + pair_bias[None]
        weights = jax.nn.softmax(logits)
        average = jnp.einsum("bhqk,bkhc->bqhc", weights, v)
        gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", x, params["gate"]) + params["gate_bias"])
        return alignment + jnp.einsum("bqhc,hco->bqo", average * gate, params["out"])

    known = jnp.arange(tokens) < jnp.array([[tokens], [tokens - 3], [tokens // 2], [0]])
    alignment = features(rows, tokens, WIDTH)
    pair = features(tokens, tokens, pair_width, seed=2)
    return model, (params, alignment, pair, known.astype(jnp.float32))


# ---- ViT: patches, a class token, softmax written out


def vision_transformer(tokens):
    draw = Params().draw
    patch = 4
    side = int((tokens - 1) ** 0.5)
    height = side
    width = (tokens - 1) // side
    params = {
        "patches": draw(patch * patch * 3, WIDTH),
        "class": draw(1, WIDTH),
        "positions": draw(height * width + 1, WIDTH),
        "qkv": draw(WIDTH, 3, HEADS, HEAD_SIZE),
        "out": draw(WIDTH, WIDTH),
        "head": draw(WIDTH, 10),
    }

    def attend(params, x):
        q, k, v = jnp.einsum("btd,dxhe->xbhte", x, params["qkv"])
        scores = jnp.einsum("bhie,bhje->bhij", q, k) / jnp.sqrt(HEAD_SIZE)
        scores = jnp.exp(scores - scores.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
        out = jnp.einsum("bhij,bhje->bihe", scores, v)
        return out.reshape(x.shape) @ params["out"]

    def model(params, images):
        batch = images.shape[0]
        x = images.reshape(batch, height, patch, width, patch, 3).transpose(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, height * width, -1) @ params["patches"]
        first = jnp.broadcast_to(params["class"], (batch, 1, WIDTH))
        x = jnp.concatenate([first, x], axis=1) + params["positions"]
        x = x + attend(params, normalise(x))
        return normalise(x[:, 0]) @ params["head"]

    return model, (params, features(2, height * patch, width * patch, 3))


# ---- Perceiver: latents read the inputs, and outputs read the latents


def perceiver(tokens):
    draw = Params().draw
    latents = 48
    params = {"latents": draw(latents, WIDTH)}
    for name in ("read", "write"):
        params[name] = {letter: draw(WIDTH, WIDTH) for letter in "qkvo"}

    def cross_attend(layer, x, y):
        """Let x [batch, T, WIDTH] attend to y [batch, S, WIDTH]."""

        def heads(z, letter):
            return (z @ layer[letter]).reshape(*z.shape[:2], HEADS, HEAD_SIZE)

        q = heads(normalise(x), "q")
        k = heads(normalise(y), "k")
        v = heads(normalise(y), "v")
        attention = jnp.einsum("bthd,bshd->bhts", q, k) * HEAD_SIZE**-0.5
        attention = jax.nn.softmax(attention, axis=-1)
        out = jnp.einsum("bhts,bshd->bthd", attention, v)
        return out.reshape(x.shape) @ layer["o"]

    def model(params, x):
        latent = jnp.broadcast_to(params["latents"], (x.shape[0], latents, WIDTH))
        latent = latent + cross_attend(params["read"], latent, x)
        return x + cross_attend(params["write"], x, latent)

    return model, (params, features(2, tokens, WIDTH))


# ---- The language model of optax's examples: Flax Linen's module, a triangle as its mask


class NanoLM(nn.Module):
    """Two blocks of Linen's attention with a causal mask made of ones."""

    @nn.compact
    def __call__(self, ids):
        length = ids.shape[-1]
        x = nn.Embed(VOCABULARY, WIDTH)(ids) + nn.Embed(length, WIDTH)(jnp.arange(length))
        for _ in range(2):
            y = nn.LayerNorm()(x)
            attention = nn.MultiHeadDotProductAttention(
                num_heads=HEADS, qkv_features=WIDTH, out_features=WIDTH, dropout_rate=0.2
            )
            x = x + attention(y, y, mask=jnp.tril(jnp.ones((length, length))), deterministic=True)
            y = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
            x = x + nn.Dense(WIDTH)(nn.relu(y))
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


def optax_nano_lm(tokens):
    model = NanoLM()
    ids = token_ids(2, tokens)
    return model.apply, (model.init(jax.random.key(0), ids), ids)


# ---- The language model of Flax's examples (lm1b): packed documents in one row


class PackedLM(nn.Module):
    """One block of Linen's attention over packed documents."""

    @nn.compact
    def __call__(self, ids, segments):
        mask = nn.combine_masks(
            nn.make_attention_mask(ids > 0, ids > 0),
            nn.make_causal_mask(ids),
            nn.make_attention_mask(segments, segments, jnp.equal),
        )
        x = nn.Embed(VOCABULARY, WIDTH)(ids)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(HEADS, use_bias=False)(y, mask=mask)
        y = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.relu(y))


def flax_packed_lm(tokens):
    model = PackedLM()
    ids = token_ids(2, tokens)
    documents = jnp.array([[tokens // 3], [tokens // 2]]) < jnp.arange(tokens)
    segments = documents.astype(jnp.int32)
    return model.apply, (model.init(jax.random.key(0), ids, segments), ids, segments)
