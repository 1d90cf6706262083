"""Compare how long models of 24 layers trace as they are and with `memeff.replace_attention`.

    python tests/replaced_trace.py linen nano_gpt gpt2 llama

GPT-2 and Llama are those of transformers 4.57 (`make clients`). Times are seconds of the process,
the least of three, each with empty caches of JAX.
"""

import sys
import time
import warnings

import jax
import jax.numpy as jnp
import replaced_by_hand
from flax import linen

import memeff

LAYERS = 24
TOKENS = 512
IDS = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)


class Transformer(linen.Module):
    """A causal transformer of Linen's own modules."""

    @linen.compact
    def __call__(self, ids):
        x = linen.Embed(64, 64)(ids)
        mask = linen.make_causal_mask(ids)
        for _ in range(LAYERS):
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
            y = linen.Dense(256)(linen.LayerNorm()(x))
            x = x + linen.Dense(64)(linen.gelu(y))
        return x


def of_linen():
    model = Transformer()
    return model.apply, (jax.eval_shape(model.init, jax.random.key(0), IDS), IDS)


def of_nano_gpt():
    """Return nanoGPT in plain JAX, with one set of weights for all layers."""
    function, (params, ids) = replaced_by_hand.nano_gpt(TOKENS)
    return function, ({**params, "layers": params["layers"][:1] * LAYERS}, ids)


def of_transformers(kind, **sizes):
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=64, **sizes)
    model = getattr(transformers, f"Flax{kind}Model")(config, _do_init=False)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), IDS.shape))
    return lambda params, ids: model(ids, params=params)[0], (params, IDS)


MODELS = {
    "linen": of_linen,
    "nano_gpt": of_nano_gpt,
    "gpt2": lambda: of_transformers("GPT2", n_embd=64, n_head=4, n_layer=LAYERS),
    "llama": lambda: of_transformers(
        "Llama",
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
    ),
}


def seconds(function, args) -> float:
    """Return the process time that tracing takes with empty caches."""
    jax.clear_caches()
    start = time.process_time()
    jax.jit(lambda *args: function(*args)).trace(*args)
    return time.process_time() - start


def main() -> None:
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or ("linen", "nano_gpt"):
        function, args = MODELS[name]()
        replaced = memeff.replace_attention(function, strict=True)
        for kind in ("forward", "gradient"):
            pair = [function, replaced]
            if kind == "gradient":
                pair = [jax.grad(lambda *args, f=f: f(*args).sum()) for f in pair]
            for f in pair:  # what the first trace of a process imports does not count
                seconds(f, args)
            times = [[seconds(f, args) for f in pair] for _ in range(3)]
            before, after = (min(column) for column in zip(*times, strict=True))
            print(
                f"{name} {kind}: {before:.2f} s, {after:.2f} s replaced: {after / before:.2f} times"
            )


if __name__ == "__main__":
    main()
