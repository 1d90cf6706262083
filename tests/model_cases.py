"""Provide sizes, a text and a forward function to the tests of `models`. No test is here."""

import functools
from pathlib import Path

import jax
from flax import nnx

ROOT = Path(__file__).parents[1]
# Tests use the same sizes wherever sizes do not matter. Many tests then share what is compiled
# once (some 3 s a gradient).
TINY = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48}


@functools.partial(jax.jit, static_argnums=0)
def compute_logits(graphdef, params, tokens, segment_ids=None):
    return nnx.merge(graphdef, params)(tokens, segment_ids)


def write_novel(folder: Path) -> str:
    """Write text into `folder`, and return its path.

    The text is the source of this repository, so that tests read the same on every machine.
    """
    for file in sorted((ROOT / "memeff").glob("*.py")):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)
