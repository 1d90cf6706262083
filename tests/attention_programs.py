"""Programs that write attention out, in many spellings, for tests of `memeff.replace_attention`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B, T, S, N, H, D = 2, 7, 9, 4, 3, 5
CHOICES = {
    "order": ("btnh", "bnth", "tbnh", "hbnt"),
    "heads": ("all", "grouped", "repeated", "folded", "vmapped", "keys_first"),
    "scale": ("none", "after", "root", "on_query", "array"),
    "cap": ("none", "tanh"),
    "mask": (
        "none",
        "tril",
        "iota",
        "constant",
        "counted",
        "window",
        "distance",
        "padding",
        "empty_row",
        "causal_padding",
        "segments",
        "dense",
        "dense_empty",
        "blocks",
    ),
    "hiding": ("where", "where_not", "added", "multiplied"),
    "low": (-math.inf, -1e4, -1e9, -1e30, "min"),
    "bias": ("none", "alibi", "dense", "heads", "keys", "both"),
    "softmax": (
        "jax",
        "plain",
        "lse",
        "log_softmax",
        "exp2",
        "no_max",
        "late",
        "reciprocal",
        "sink",
        "sink_first",
        "sink_added",
        "one_added",
        "sink_in_log",
    ),
    "after": ("none", "head_factor", "head_einsum", "zeros", "nan_to_num", "nan_and_zeros"),
    "nesting": ("none", "jit", "remat", "scan", "cond", "loop", "vmap", "scan_mask"),
}
DECOYS = ("wrong_axis", "twice", "returned", "other_sum", "values", "transposed", "zeros_after")


@dataclasses.dataclass(frozen=True)
class Program:
    """One spelling: a choice from each of CHOICES, and perhaps a decoy."""

    order: str = "btnh"
    heads: str = "all"
    scale: str = "after"
    cap: str = "none"
    mask: str = "none"
    hiding: str = "where"
    low: float | str = -1e9
    bias: str = "none"
    softmax: str = "jax"
    after: str = "none"
    nesting: str = "none"
    decoy: str | None = None

    def __call__(self, arrays):
        """Run the program on the arrays of `make_arrays`."""
        if self.nesting == "scan_mask":
            visible = visible_pairs(self.mask, arrays)
            if "errors" in arrays:
                arrays = {**arrays, "errors": arrays["errors"][0]}

            def layer(carry, factor):
                added = jax.tree.map(lambda x: factor * x, self._attend(arrays, visible))
                return jax.tree.map(jnp.add, carry, added), None

            return lax.scan(layer, self._zero(arrays), jnp.ones(2, arrays["q"].dtype))[0]

        def attend(q, number=0):
            arrays_here = {**arrays, "q": q}
            if "errors" in arrays:
                arrays_here["errors"] = arrays["errors"][number]
            return self._attend(arrays_here, visible_pairs(self.mask, arrays_here))

        q = arrays["q"]
        if self.nesting == "jit":
            return jax.jit(attend)(q)
        if self.nesting == "remat":
            return jax.checkpoint(attend)(q)
        if self.nesting == "cond":
            return lax.cond(q.sum() > 1e6, lambda q: attend(2 * q), attend, q)
        if self.nesting == "scan":
            return lax.scan(lambda q, i: (q * 1.1, attend(q, i)), q, jnp.arange(2))[1]
        if self.nesting == "loop":
            return lax.fori_loop(0, 2, lambda i, _: attend(q * (1 + i), i), self._zero(arrays))
        if self.nesting == "vmap":
            return jax.vmap(attend)(jnp.stack([q, 2 * q]), jnp.arange(2))
        return attend(q)

    def _zero(self, arrays):
        arrays = {name: x for name, x in arrays.items() if name != "errors"}
        shape = jax.eval_shape(lambda: self._attend(arrays, visible_pairs(self.mask, arrays)))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)

    def _attend(self, arrays, visible):
        q, k, v = arrays["q"], arrays["k"], arrays["v"]
        if self.scale == "on_query":
            q = q / math.sqrt(H)
        if self.heads in ("grouped", "repeated"):
            k, v = k[:, :, ::2], v[:, :, ::2]
        if self.heads == "repeated":
            k, v = jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2)
        s = self._dots(q, k)  # B N T S
        s = self._scaled(s, arrays)
        if self.cap == "tanh":
            s = 3 * jnp.tanh(s / 3)
        s = s + self._bias(arrays)
        s = self._hide(s, visible)
        if "errors" in arrays:  # of logits that are rounded near -1e9
            s = s + jnp.where(jnp.abs(s) >= 2**29, arrays["errors"], 0)
        return self._average(s, v, arrays, visible)

    def _dots(self, q, k):
        if self.heads == "folded":
            fold = lambda x: x.transpose(0, 2, 1, 3).reshape(B * N, -1, H)
            return (fold(q) @ fold(k).swapaxes(1, 2)).reshape(B, N, T, S)
        if self.heads == "vmapped":
            product = jax.vmap(jax.vmap(lambda q, k: q @ k.T, (1, 1)))
            return product(q, k)
        if self.heads == "keys_first":
            return jnp.einsum("bsnh,btnh->sbnt", k, q).transpose(1, 2, 3, 0)
        if self.heads == "grouped":
            s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, N // 2, 2, H), k)
            return s.reshape(B, N, T, S)
        spelled = {"t": self.order, "s": self.order.replace("t", "s")}
        arrange = lambda x, a: jnp.transpose(x, ["btnh".index(d) for d in a])
        q = arrange(q, self.order)
        k = arrange(k, self.order)
        return jnp.einsum(f"{spelled['t']},{spelled['s']}->bnts", q, k)

    def _scaled(self, s, arrays):
        if self.scale == "after":
            return s * 0.5
        if self.scale == "root":
            return s / jnp.sqrt(H)
        if self.scale == "array":
            return s * arrays["scale"]
        return s

    def _bias(self, arrays):
        distance = jnp.arange(S) - jnp.arange(T)[:, None]
        terms = {
            "none": 0.0,
            "alibi": -jnp.abs(distance) * arrays["slopes"][:, None, None],
            "dense": arrays["bias"],
            "heads": arrays["slopes"][:, None, None],
            "keys": arrays["key_bias"][:, None, None, :],
            "both": arrays["bias"] + arrays["key_bias"][:, None, None, :],
        }
        return terms[self.bias]

    def _hide(self, s, visible):
        if visible is None:
            return s
        low = float(jnp.finfo(s.dtype).min) if self.low == "min" else self.low
        if self.hiding == "where_not":
            return jnp.where(~visible, low, s)
        if self.hiding == "added":
            return s + jnp.where(visible, 0.0, low)
        if self.hiding == "multiplied" and math.isfinite(low):
            return s + (1 - visible.astype(s.dtype)) * low
        return jnp.where(visible, s, low)

    def _average(self, s, v, arrays, visible):
        if self.decoy == "transposed":
            square = s[..., :T]
            s = s.at[..., :T].set(square + square.swapaxes(-1, -2))
        if self.decoy == "values":
            s = jnp.where(s >= jnp.sort(s, -1)[..., -3:-2], s, -jnp.inf)
        axis = -2 if self.decoy == "wrong_axis" else -1
        late = None
        if self.softmax == "jax":
            p = jax.nn.softmax(s, axis=axis)
        elif self.softmax == "sink":
            sink = jnp.broadcast_to(arrays["slopes"][:, None, None], (*s.shape[:-1], 1))
            p = jax.nn.softmax(jnp.concatenate([s, sink], -1), axis=axis)[..., :-1]
        elif self.softmax == "sink_first":
            s = jnp.pad(s, [(0, 0)] * 3 + [(1, 0)])
            e = jnp.exp(s - s.max(axis, keepdims=True))
            p = (e / e.sum(axis, keepdims=True))[..., 1:]
        elif self.softmax == "sink_added":
            sink = arrays["slopes"][:, None, None]
            highest = jnp.maximum(s.max(axis, keepdims=True), sink)
            e = jnp.exp(s - highest)
            p = e / (jnp.exp(sink - highest) + e.sum(axis, keepdims=True))
        elif self.softmax == "sink_in_log":
            sink = arrays["slopes"][:, None, None]
            highest = jnp.maximum(s.max(axis, keepdims=True), sink)
            total = jnp.exp(s - highest).sum(axis, keepdims=True) + jnp.exp(sink - highest)
            p = jnp.exp(s - jnp.log(total) - highest)
        elif self.softmax == "one_added":
            e = jnp.exp(s)
            p = e / (1 + e.sum(axis, keepdims=True))
        elif self.softmax == "lse":
            p = jnp.exp(s - jax.nn.logsumexp(s, axis=axis, keepdims=True))
        elif self.softmax == "log_softmax":
            p = jnp.exp(jax.nn.log_softmax(s, axis=axis))
        else:
            highest = 0.0 if self.softmax == "no_max" else s.max(axis, keepdims=True)
            e = jnp.exp2((s - highest) / math.log(2)) if self.softmax == "exp2" else None
            e = jnp.exp(s - highest) if e is None else e
            total = e.sum(axis, keepdims=True)
            if self.decoy == "other_sum":
                total = total + 0.5
            if self.softmax == "late":
                p = e
                late = total
            else:
                p = e * (1 / total) if self.softmax == "reciprocal" else e / total
        if self.after == "head_factor":
            p = p * arrays["slopes"][:, None, None]
        if self.after == "head_einsum":
            p = jnp.einsum("bnts,n->bnts", p, arrays["slopes"])
        if self.after == "nan_to_num":
            p = jnp.nan_to_num(p)
        if self.after == "nan_and_zeros":
            p = jnp.where(jnp.isnan(p), 0, p)
        if self.after in ("zeros", "nan_and_zeros") and visible is not None:
            p = jnp.where(visible, p, 0)
        if self.decoy == "zeros_after":
            p = jnp.where(arrays["dense"], p, 0)
        out = self._times_value(p, v)
        if late is not None:
            out = out / late
        if self.decoy == "twice":
            return out, self._times_value(p, v * v)
        if self.decoy == "returned":
            return out, p.mean(1)
        return out

    def _times_value(self, p, v):
        if self.heads == "folded":
            v = v.transpose(0, 2, 1, 3).reshape(B * N, S, D)
            return (p.reshape(B * N, T, S) @ v).reshape(B, N, T, D)
        if self.heads == "vmapped":
            return jax.vmap(jax.vmap(lambda p, v: p @ v, (0, 1)))(p, v)
        if self.heads == "keys_first":
            return jnp.einsum("bsnd,bnts->bntd", v, p)
        if self.heads == "grouped":
            p = p.reshape(B, N // 2, 2, T, S)
            return jnp.einsum("bkgts,bskd->bkgtd", p, v).reshape(B, N, T, D)
        return jnp.einsum("bnts,bsnd->bntd", p, v)


def visible_pairs(name, arrays):
    """Return who may attend, broadcastable to B N T S; None if all may."""
    rows = jnp.arange(T)[:, None]
    columns = jnp.arange(S)
    padding = (columns < arrays["lengths"][:, None])[:, None, None, :]
    causal = jnp.tril(jnp.ones((T, S), bool))
    q_ids, k_ids = arrays["q_ids"], arrays["k_ids"]
    ones = jnp.ones((T, S), jnp.int32)
    masks = {
        "none": None,
        "tril": causal,
        "iota": lax.broadcasted_iota(jnp.int32, (T, S), 0) >= columns,
        "constant": np.tril(np.ones((1, 1, T, S), bool), 1),
        "counted": jnp.cumsum(ones, 0) >= jnp.cumsum(ones, 1),
        "window": (rows - columns < 4) & (columns <= rows + 1),
        "distance": jnp.abs(rows - columns) <= 2,
        "padding": padding,
        "empty_row": (columns < arrays["lengths"][:, None] - 5)[:, None, None, :],
        "causal_padding": causal & padding,
        "segments": (q_ids[:, :, None] == k_ids[:, None, :])[:, None],
        "dense": arrays["dense"],
        "dense_empty": arrays["dense_empty"],
        "blocks": rows // 3 >= columns // 4,
    }
    return masks[name]


def make_arrays(dtype="float32", seed=0):
    """Return the arrays that programs take."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    dense = rng.random((B, 1, T, S)) < 0.6
    dense[..., 0] = True
    dense_empty = dense.copy()
    dense_empty[0, 0, 2] = False
    return {
        "q": normal(B, T, N, H),
        "k": normal(B, S, N, H),
        "v": normal(B, S, N, D),
        "scale": normal(),
        "slopes": normal(N),
        "bias": normal(1, N, T, S),
        "key_bias": normal(B, S),
        "lengths": jnp.array([5, 8]),
        "q_ids": jnp.array([[0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 5, 5]]),
        "k_ids": jnp.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 5, 5]]),
        "dense": jnp.asarray(dense),
        "dense_empty": jnp.asarray(dense_empty),
    }


def results_and_gradients(f):
    """Return a function of arrays: results of f, and gradients for random cotangents."""

    def call(arrays):
        floats = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        floats.pop("errors", None)
        results, pull = jax.vjp(lambda floats: f({**arrays, **floats}), floats)
        leaves, structure = jax.tree.flatten(results)
        rng = np.random.default_rng(0)
        cotangents = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
        return leaves, pull(jax.tree.unflatten(structure, cotangents))[0]

    return call
