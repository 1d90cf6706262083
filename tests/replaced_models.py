"""Models whose attention is written out, and how many places `replace_attention` finds in each.

A model's function takes a number of tokens and returns (f, args): f is what a user of the package
would jit, with random weights, and args are its parameters and inputs. Nothing here knows memeff.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replaced_by_hand
from replaced_by_hand import HEAD_SIZE, HEADS, VOCABULARY, WIDTH, features, token_ids

os.environ["KERAS_BACKEND"] = "jax"

B = 2


def random_like(tree, scale=0.1):
    """Return the arrays of a tree plus normal numbers, so that none is all zeros or ones."""
    rng = np.random.default_rng(1)

    def moved(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        noise = scale * rng.standard_normal(x.shape)
        return jnp.asarray(np.asarray(x) + noise, x.dtype)

    return jax.tree.map(moved, tree)


NORM_SCALES = ("scale", "weight")  # what Linen and transformers call them


def random_params(init, *arguments):
    """Return float32 random numbers in the shapes of `init(*arguments)`, without running it.

    Scales of norms are near 1 and embeddings are large, because tokens would be all alike
    otherwise, and the gradients of queries and keys would cancel.
    """
    rng = np.random.default_rng(1)

    def drawn(path, x):
        name = getattr(path[-1], "key", None)
        noise = rng.standard_normal(x.shape)
        if len(x.shape) == 1:
            noise = 0.2 * noise + (name in NORM_SCALES)
        elif name != "embedding":
            noise *= 0.7 * x.shape[0] ** -0.5
        return jnp.asarray(noise, x.dtype)

    return jax.tree_util.tree_map_with_path(drawn, jax.eval_shape(init, *arguments))


def padded(tokens):
    """Return which tokens of two rows are no padding, int32 [B, tokens]; rows begin with one."""
    lengths = jnp.array([[tokens], [2 * tokens // 3]])
    return (jnp.arange(tokens) < lengths).astype(jnp.int32)


# ---- layers


def flax_linen(tokens):
    """Return Linen's module with a causal mask."""
    nn = pytest.importorskip("flax.linen")
    layer = nn.MultiHeadDotProductAttention(HEADS)
    x = features(B, tokens, WIDTH)

    def model(params, x):
        return layer.apply(params, x, mask=nn.make_causal_mask(x[..., 0]))

    return model, (random_params(layer.init, jax.random.key(0), x), x)


def flax_linen_in_training(tokens):
    """Return Linen's module with dropout of the probabilities, whose bits come from a key."""
    nn = pytest.importorskip("flax.linen")
    layer = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.1, deterministic=False)
    x = features(B, tokens, WIDTH)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def model(params, x):
        mask = nn.make_causal_mask(x[..., 0])
        return layer.apply(params, x, mask=mask, rngs={"dropout": jax.random.key(2)})

    return model, (random_params(layer.init, keys, x), x)


def nnx_function(call, layer):
    """Return the function of `call(layer, *inputs)` for an NNX module, and its parameters."""
    nnx = pytest.importorskip("flax.nnx")
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def model(params, *inputs):
        state = jax.tree.map(jnp.copy, rest)  # a call counts its draws in its state
        return call(nnx.merge(graph, params, state), *inputs)

    return model, random_like(params)


def flax_nnx(tokens):
    """Return NNX's module with a causal mask, whose keys are those of fewer heads by repetition."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))

    def call(layer, x):
        return layer(x, mask=nnx.make_causal_mask(x[..., 0]))

    model, params = nnx_function(call, layer)
    return model, (params, features(B, tokens, WIDTH))


def flax_nnx_in_training(tokens):
    """Return NNX's module with dropout of the probabilities, whose bits come from its own state."""
    nnx = pytest.importorskip("flax.nnx")
    layer = nnx.MultiHeadAttention(
        HEADS, WIDTH, decode=False, dropout_rate=0.1, deterministic=False, rngs=nnx.Rngs(0)
    )
    model, params = nnx_function(lambda layer, x: layer(x), layer)
    return model, (params, features(B, tokens, WIDTH))


def equinox(tokens):
    """Return Equinox's module, whose heads and examples are both axes of a vmap."""
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_array)

    def model(params, x):
        layer = eqx.combine(params, static)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jax.vmap(lambda row: layer(row, row, row, mask=mask))(x)

    return model, (random_like(params), features(B, tokens, WIDTH))


def equinox_in_training(tokens):
    """Return Equinox's module with dropout, whose heads have keys of their own."""
    eqx = pytest.importorskip("equinox")
    layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=0.1, key=jax.random.key(0))

    def model(x):
        keys = jax.random.split(jax.random.key(1), len(x))
        return jax.vmap(lambda row, key: layer(row, row, row, key=key))(x, keys)

    return model, (features(B, tokens, WIDTH),)


def haiku(tokens):
    """Return two layers of Haiku with a causal mask."""
    hk = pytest.importorskip("haiku")

    def two_layers(x):
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))[None, None]
        for name in ("first", "second"):
            init = hk.initializers.VarianceScaling(2.0)
            layer = hk.MultiHeadAttention(
                HEADS, HEAD_SIZE, w_init=init, model_size=WIDTH, name=name
            )
            x = x + layer(x, x, x, mask=causal)
        return x

    model = hk.without_apply_rng(hk.transform(two_layers))
    x = features(B, tokens, WIDTH)
    return model.apply, (random_params(model.init, jax.random.key(0), x), x)


def keras_variables(model):
    """Return values of the trainable variables, far from even attention, and of the others."""
    params = [variable.value for variable in model.trainable_variables]
    state = [np.asarray(variable) for variable in model.non_trainable_variables]
    return random_like(params, scale=0.2), state


def keras_layer(name, tokens, sizes, dropout=0.0, **options):
    keras = pytest.importorskip("keras")
    layer = getattr(keras.layers, name)(*sizes, dropout=dropout)
    layer.build((B, tokens, WIDTH), (B, tokens, WIDTH))
    params, state = keras_variables(layer)

    def model(params, x):
        return layer.stateless_call(params, state, x, x, **options)[0]

    return model, (params, features(B, tokens, WIDTH))


def keras_heads(tokens):
    """Return Keras' layer, which calls jax.nn's function."""
    return keras_layer("MultiHeadAttention", tokens, (HEADS, HEAD_SIZE), use_causal_mask=True)


def keras_heads_with_dropout(tokens):
    """Return Keras' layer with dropout, out of training; it writes attention out."""
    options = {"use_causal_mask": True, "training": False}
    return keras_layer("MultiHeadAttention", tokens, (HEADS, HEAD_SIZE), 0.1, **options)


def keras_in_training(tokens):
    """Return Keras' layer with dropout in training, whose seed is in its state."""
    options = {"use_causal_mask": True, "training": True}
    return keras_layer("MultiHeadAttention", tokens, (HEADS, HEAD_SIZE), 0.1, **options)


def keras_grouped_heads(tokens):
    options = {"use_causal_mask": True, "training": False}
    return keras_layer("GroupQueryAttention", tokens, (HEAD_SIZE, HEADS, 2), 0.1, **options)


def levanter(tokens):
    """Return the vanilla attention of Levanter in named axes: grouped heads, causal, a soft cap."""
    attention = pytest.importorskip("levanter.layers.attention")
    hax = pytest.importorskip("haliax")
    batch = hax.Axis("batch", B)
    kv_heads = hax.Axis("kv_head", 2)
    group = hax.Axis("q_heads_per_group", HEADS // 2)
    embed = hax.Axis("embed", WIDTH)
    size = hax.Axis("head_size", HEAD_SIZE)
    position = hax.Axis("position", tokens)
    init = random_params(
        lambda: {
            "q": jnp.zeros((WIDTH, 2, HEADS // 2, HEAD_SIZE)),
            "k": jnp.zeros((WIDTH, 2, HEAD_SIZE)),
            "v": jnp.zeros((WIDTH, 2, HEAD_SIZE)),
        }
    )

    def model(params, x):
        x = hax.named(x, (batch, position, embed))
        q = hax.dot(x, hax.named(params["q"], (embed, kv_heads, group, size)), axis=embed)
        k = hax.dot(x, hax.named(params["k"], (embed, kv_heads, size)), axis=embed)
        v = hax.dot(x, hax.named(params["v"], (embed, kv_heads, size)), axis=embed)
        out = attention.dot_product_attention(
            "position",
            "key_position",
            "head_size",
            q,
            k.rename({"position": "key_position"}),
            v.rename({"position": "key_position"}),
            mask=attention.AttentionMask.causal(),
            attn_backend=attention.AttentionBackend.VANILLA,
            logits_soft_cap=20.0,
        )
        return out.rearrange((batch, position, kv_heads, group, size)).array

    return model, (init, features(B, tokens, WIDTH))


# ---- Hugging Face's Flax models


def hugging_face(name, config_name, inputs=(), **config):
    """Return the function and arguments of a Flax model of transformers, for tokens and a mask.

    `inputs` are further arguments. The first result of the model is returned.
    """
    transformers = pytest.importorskip("transformers")
    model_class = getattr(transformers, name, None)
    if model_class is None:
        pytest.skip(f"needs {name} of transformers 4.57, the last version with Flax models")
    model = model_class(getattr(transformers, config_name)(**config), _do_init=False)
    params = random_params(lambda key: model.init_weights(key, model.input_shape), KEY)

    def function(params, *inputs):
        return model(*inputs, params=params)[0]

    return function, (params, *inputs)


KEY = jax.random.PRNGKey(0)


def flax_gpt2(tokens):
    return hugging_face(
        "FlaxGPT2Model",
        "GPT2Config",
        (token_ids(B, tokens), padded(tokens)),
        vocab_size=VOCABULARY,
        n_positions=tokens,
        n_embd=WIDTH,
        n_layer=2,
        n_head=HEADS,
    )


def flax_bert(tokens):
    return hugging_face(
        "FlaxBertModel",
        "BertConfig",
        (token_ids(B, tokens), padded(tokens)),
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=tokens,
    )


def flax_llama(tokens):
    return hugging_face(
        "FlaxLlamaModel",
        "LlamaConfig",
        (token_ids(B, tokens), padded(tokens)),
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
    )


def flax_whisper(tokens):
    """Return encoder and decoder; there are half as many text tokens as frames of sound."""
    text = tokens // 2
    sound = features(1, 8, 2 * tokens)
    return hugging_face(
        "FlaxWhisperModel",
        "WhisperConfig",
        (sound, token_ids(1, text)),
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDTH,
        decoder_ffn_dim=WIDTH,
        max_source_positions=tokens,
        max_target_positions=text,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


@contextlib.contextmanager
def clip_with_names_of_numpy():
    """Let jnp.clip take a_max, which JAX has dropped and transformers 4.57 passes in T5."""
    clip = jnp.clip

    def clip_as_before(x, a_min=None, a_max=None):
        return clip(x, min=a_min, max=a_max)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jnp, "clip", clip_as_before)
        yield


def flax_t5(tokens):
    """Return encoder and decoder of T5, whose bias of positions comes from a table."""
    ids = token_ids(1, tokens)
    with clip_with_names_of_numpy():
        model, arguments = hugging_face(
            "FlaxT5Model",
            "T5Config",
            (ids, padded(tokens)[1:], ids[:, : tokens // 2]),
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=HEAD_SIZE,
            d_ff=WIDTH,
            num_layers=1,
            num_heads=HEADS,
            decoder_start_token_id=0,
        )

    def function(params, ids, mask, decoder_ids):
        with clip_with_names_of_numpy():
            return model(params, ids, mask, decoder_ids)

    return function, arguments


# ---- language models


@contextlib.contextmanager
def params_of_flax():
    """Keep Flax's `Module.param`, which the import of gemma replaces by one of fewer arguments."""
    linen = pytest.importorskip("flax.linen")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linen.Module, "param", linen.Module.param)
        yield


def gemma(tokens):
    """Return Gemma 2 of google-deepmind: soft cap, a window in one layer, grouped heads."""
    with params_of_flax():
        config = pytest.importorskip("gemma.gm.nn._config")
        modules = pytest.importorskip("gemma.gm.nn._modules")
        transformer = pytest.importorskip("gemma.gm.nn._transformer")
    kinds = modules.AttentionType
    model = transformer.Transformer(
        config=config.TransformerConfig(
            num_embed=VOCABULARY,
            embed_dim=WIDTH,
            hidden_dim=WIDTH,
            num_heads=HEADS,
            head_dim=HEAD_SIZE,
            num_kv_heads=2,
            final_logit_softcap=30.0,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
            attn_logits_soft_cap=50.0,
            sliding_window_size=16,
        ),
        dtype=jnp.float32,
    )
    ids = token_ids(1, tokens)
    params = random_like(model.init(jax.random.key(0), ids[:, :8]))

    def function(params, ids):
        return model.apply(params, ids).logits

    return function, (params, ids)


def tunix_llama(tokens):
    llama = pytest.importorskip("tunix.models.llama3.model")
    nnx = pytest.importorskip("flax.nnx")
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=WIDTH,
        num_heads=HEADS,
        head_dim=HEAD_SIZE,
        num_kv_heads=2,
        rope_theta=500_000,
        norm_eps=1e-5,
        weight_tying=True,
    )

    def call(model, ids):
        positions = jnp.arange(tokens)[None]
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))[None]
        return model(ids, positions, None, mask)[0]

    function, params = nnx_function(call, llama.Llama3(config, rngs=nnx.Rngs(0)))
    return function, (params, token_ids(1, tokens))


def keras_hub_model(name, **config):
    """Return a backbone of keras-hub for two padded rows of tokens."""
    hub = pytest.importorskip("keras_hub")
    model = getattr(hub.models, name)(vocabulary_size=VOCABULARY, dropout=0.1, **config)
    params, state = keras_variables(model)

    def function(params, inputs):
        result = model.stateless_call(params, state, inputs, training=False)[0]
        return result["sequence_output"] if isinstance(result, dict) else result

    return function, params


def keras_hub_gpt2(tokens):
    function, params = keras_hub_model(
        "GPT2Backbone",
        num_layers=2,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=WIDTH,
        max_sequence_length=tokens,
    )
    inputs = {"token_ids": token_ids(B, tokens), "padding_mask": padded(tokens)}
    return function, (params, inputs)


def keras_hub_bert(tokens):
    function, params = keras_hub_model(
        "BertBackbone",
        num_layers=2,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=WIDTH,
        max_sequence_length=tokens,
    )
    ids = token_ids(B, tokens)
    inputs = {"token_ids": ids, "padding_mask": padded(tokens), "segment_ids": jnp.zeros_like(ids)}
    return function, (params, inputs)


def keras_hub_gemma(tokens):
    """Return Gemma 2 of keras-hub: soft cap, a window in every second layer, grouped heads."""
    function, params = keras_hub_model(
        "GemmaBackbone",
        num_layers=2,
        num_query_heads=HEADS,
        num_key_value_heads=2,
        hidden_dim=WIDTH,
        intermediate_dim=WIDTH,
        head_dim=HEAD_SIZE,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
        sliding_window_size=16,
    )
    inputs = {"token_ids": token_ids(B, tokens), "padding_mask": padded(tokens)}
    return function, (params, inputs)


# ---- packages of fewer users, tried last


def penzai_gemma(tokens):
    """Return Gemma 2 as Penzai builds it from named axes: soft cap, window, grouped heads."""
    common = pytest.importorskip("penzai.models.transformer.variants.llamalike_common")
    pz = pytest.importorskip("penzai").pz
    config = common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=HEADS // 2,
        embedding_dim=WIDTH,
        projection_dim=HEAD_SIZE,
        mlp_hidden_dim=WIDTH,
        num_decoder_blocks=2,
        vocab_size=VOCABULARY,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
        attention_type=(
            common.AttentionTypeSlidingWindowCausal(16),
            common.AttentionTypeGlobalCausal(),
        ),
        attn_logits_soft_cap=50.0,
    )
    model = common.build_llamalike_transformer(config, init_base_rng=jax.random.key(0))
    unbound, variables = pz.unbind_params(model, freeze=True)
    params = random_like({variable.label: variable.value for variable in variables})

    def function(params, ids):
        bound = []
        for variable in variables:
            bound.append(pz.ParameterValue(label=variable.label, value=params[variable.label]))
        ids = pz.nx.wrap(ids).tag("batch", "seq")
        positions = pz.nx.arange("seq", ids.named_shape["seq"])
        logits = pz.bind_variables(unbound, bound)(ids, token_positions=positions)
        return logits.unwrap("batch", "seq", "vocabulary")

    return function, (params, token_ids(1, tokens))


def equimo_vit(tokens):
    """Return one block of Equimo's vision transformer under vmap."""
    attention = pytest.importorskip("equimo.layers.attention")
    eqx = pytest.importorskip("equinox")
    block = attention.AttentionBlock(dim=WIDTH, num_heads=HEADS, key=jax.random.key(0))
    params, static = eqx.partition(block, eqx.is_inexact_array)

    def model(params, x):
        block = eqx.combine(params, static)
        return jax.vmap(lambda row: block(row, key=jax.random.key(0), inference=True))(x)

    return model, (random_like(params), features(B, tokens, WIDTH))


def ablanx_block(tokens):
    """Return one block of the antibody language model AbLang 2, whose mask is a float bias."""
    ablang = pytest.importorskip("ablang_jax.model")
    block = ablang.Block()
    frequencies = ablang._rope_freqs(ablang.HEAD_DIM)
    x = features(1, tokens, ablang.HID)
    mask = padded(tokens)[1:].astype(jnp.float32)
    params = random_params(block.init, jax.random.key(0), x, mask, frequencies)

    def model(params, x, mask):
        return block.apply(params, x, mask, frequencies)[0]

    return model, (params, x, mask)


def attnax_alibi(tokens):
    """Return the NNX module of attnax: ALiBi, a window, grouped heads and rotary positions."""
    attnax = pytest.importorskip("attnax.attention")
    scores = pytest.importorskip("attnax.kernels.score_mods")
    nnx = pytest.importorskip("flax.nnx")
    layer = attnax.MultiHeadAttention(
        nnx.Rngs(0),
        num_heads=HEADS,
        in_features=WIDTH,
        num_kv_heads=2,
        score_mod=scores.alibi_mod(HEADS),
        attention_window=24,
        use_rope=True,
        rope_max_positions=tokens,
    )
    model, params = nnx_function(lambda layer, x: layer(x, deterministic=True), layer)
    return model, (params, features(B, tokens, WIDTH))


class Model(NamedTuple):
    """A model, how its user replaces its attention, and what becomes of it."""

    make: Callable[[int], tuple[Callable[..., Any], tuple]]
    replaced: int  # the number of places that compute with memeff
    line: str  # what the user writes
    left: str = ""  # what is left alone and why; empty: nothing is
    quadratic: str = ""  # what array of tokens x tokens stays in memory; empty: none


HAND = replaced_by_hand
FUNCTION = "replace_attention(model)"
APPLY = "replace_attention(model.apply)"
NNX = "replace_attention(lambda model, x: model(x))"
STATELESS = "replace_attention(model.stateless_call)"
HUGGING_FACE = "replace_attention(lambda params, ids: model(ids, params=params)[0])"
EQUINOX = "replace_attention(lambda model, x: model(x, x, x))"
MODELS = {
    "nanoGPT by hand": Model(HAND.nano_gpt, 2, FUNCTION),
    "AlphaFold rows by hand": Model(
        HAND.alphafold_rows, 1, FUNCTION, quadratic="the pair representation and its bias"
    ),
    "ViT by hand": Model(HAND.vision_transformer, 1, FUNCTION),
    "Perceiver by hand": Model(HAND.perceiver, 2, FUNCTION),
    "optax nanoLM": Model(HAND.optax_nano_lm, 2, APPLY),
    "Flax lm1b": Model(HAND.flax_packed_lm, 1, APPLY),
    "Flax Linen": Model(flax_linen, 1, APPLY),
    "Flax Linen in training": Model(flax_linen_in_training, 1, APPLY),
    "Flax NNX": Model(flax_nnx, 1, NNX),
    "Flax NNX in training": Model(flax_nnx_in_training, 1, NNX),
    "Equinox": Model(equinox, 1, EQUINOX),
    "Equinox in training": Model(
        equinox_in_training, 0, EQUINOX, left="dropout, whose heads have keys of their own"
    ),
    "Haiku": Model(haiku, 2, APPLY),
    "Keras": Model(keras_heads, 1, STATELESS),
    "Keras, dropout": Model(keras_heads_with_dropout, 1, STATELESS),
    "Keras in training": Model(keras_in_training, 1, STATELESS),
    "Keras, grouped heads": Model(keras_grouped_heads, 1, STATELESS),
    "Levanter": Model(levanter, 1, FUNCTION),
    "transformers GPT-2": Model(flax_gpt2, 2, HUGGING_FACE),
    "transformers BERT": Model(flax_bert, 2, HUGGING_FACE),
    "transformers Llama": Model(flax_llama, 2, HUGGING_FACE),
    "transformers Whisper": Model(flax_whisper, 3, HUGGING_FACE),
    "transformers T5": Model(
        flax_t5,
        3,
        HUGGING_FACE,
        quadratic="the bias of positions, which the model gathers from a table",
    ),
    "gemma": Model(gemma, 2, APPLY),
    "tunix Llama 3": Model(tunix_llama, 2, NNX),
    "keras-hub GPT-2": Model(keras_hub_gpt2, 2, STATELESS),
    "keras-hub BERT": Model(keras_hub_bert, 2, STATELESS),
    "keras-hub Gemma": Model(
        keras_hub_gemma, 2, STATELESS, quadratic="its mask, which it searches for rows without keys"
    ),
    "Penzai Gemma": Model(penzai_gemma, 2, FUNCTION),
    "Equimo ViT": Model(equimo_vit, 1, "replace_attention(lambda model, x: model(x, key=key))"),
    "ablanx": Model(ablanx_block, 1, APPLY),
    "attnax": Model(attnax_alibi, 1, NNX),
}
