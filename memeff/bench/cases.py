"""The calls that the bench measures: their sizes, what they compute, and their inputs."""

import dataclasses
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

MASKS = ("causal", "full")
MODES = ("forward", "gradient")
HIGHER_MODES = ("jvp", "hvp", "grad-of-grad")
TITLES = {
    "forward": "forward",
    "gradient": "forward + gradient",
    "jvp": "jvp",
    "hvp": "hvp",
    "grad-of-grad": "grad of grad",
}
# Products of the matrices of a tile. For the other modes there is no number that people agree on.
MATRIX_PRODUCTS = {"forward": 2, "gradient": 7, "jvp": 6}
EXTRAS_THAT_HIDE_PAIRS = ("window", "documents")

Row = dict[str, Any]  # one result: the fields of a Case, `implementation`, and the figures
Shapes = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to measure, with S = `length` keys and T = `query_length` queries.

    `mode` says what is computed:

    - "forward": out.
    - "gradient": out, and the gradients of query, key and value from a random cotangent.
    - "jvp": out and its tangent. The directions are the inputs themselves.
    - "hvp": the gradient and its tangent.
    - "grad-of-grad": the gradient of the product of the gradient with a direction.

    Without `query_length` there are as many queries as keys. Fewer queries are the last ones, so
    a causal mask lets them see all keys before them.
    """

    length: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    mask: str = "causal"
    mode: str = "forward"
    query_length: int | None = None
    extra: str = "plain"  # a name of extras.NAMES: a score or a mask

    @property
    def queries(self) -> int:
        """The number of queries T."""
        return self.query_length or self.length

    @property
    def flops(self) -> float | None:
        """The operations of the call's matrix products, or None where no count is agreed on."""
        if self.mode not in MATRIX_PRODUCTS or self.extra in EXTRAS_THAT_HIDE_PAIRS:
            return None
        keys_per_query = self.length
        if self.mask == "causal":
            keys_per_query -= self.queries // 2
        pairs = self.batch * self.heads * self.queries * keys_per_query
        return MATRIX_PRODUCTS[self.mode] * 2 * pairs * self.head_dim

    @property
    def shapes(self) -> Shapes:
        """The shapes of query, key, value, and the cotangent of out."""
        query = (self.batch, self.queries, self.heads, self.head_dim)
        key = (self.batch, self.length, self.kv_heads, self.head_dim)
        return query, key, key, query

    @property
    def input_bytes(self) -> int:
        """The bytes of query, key and value."""
        return array_bytes(self.shapes[:3], self.dtype)

    @property
    def key_value_bytes(self) -> int:
        """The bytes of key and value."""
        return array_bytes(self.shapes[1:3], self.dtype)


def array_bytes(shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
    """Return the bytes of arrays of these shapes together."""
    elements = sum(math.prod(shape) for shape in shapes)
    return elements * jax.numpy.dtype(dtype).itemsize


def case_row(name: str, case: Case) -> Row:
    """Return the fields with which every result of implementation `name` begins."""
    return {"implementation": name, **dataclasses.asdict(case)}


def case_of_row(row: Row) -> Case:
    """Return the case that a result belongs to."""
    return Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})


def call_title(row: Row) -> str:
    """Return a result's call in words, such as "causal forward, alibi"."""
    extra = "" if row["extra"] == "plain" else f", {row['extra']}"
    return f"{row['mask']} {TITLES[row['mode']]}{extra}"


_input_cache: dict[tuple[Shapes, str], tuple[jax.Array, ...]] = {}


def input_arrays(case: Case) -> tuple[jax.Array, ...]:
    """Return normal random query, key, value and cotangent of out.

    The arrays of the last case are kept, so that all implementations share them. They are drawn on
    the host, because holes in a device's memory would make a call take more than it asks for.
    """
    cache_key = (case.shapes, case.dtype)
    if cache_key not in _input_cache:
        _input_cache.clear()
        with ThreadPoolExecutor() as pool:
            arrays = pool.map(_normal, range(4), case.shapes, [case.dtype] * 4)
            on_device = tuple(jax.device_put(array) for array in arrays)
        _input_cache[cache_key] = jax.block_until_ready(on_device)
    return _input_cache[cache_key]


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Draw standard normal numbers in float32 and round them to `dtype`."""
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return numbers.astype(jax.numpy.dtype(dtype))
