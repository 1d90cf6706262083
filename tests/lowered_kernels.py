"""Write the Mosaic modules of every Hopper kernel of tests/sm90a.py, and digests.

Source locations are removed.

    python tests/lowered_kernels.py FOLDER [case ...]

This needs JAX's CUDA plugin, but no GPU (see the Makefile's `sm90a`). tests/lowered.py does the
same for plain JAX.
"""

import os
import re
import sys
from pathlib import Path

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
sys.path.insert(0, str(Path(__file__).parents[1]))

import sm90a  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax._src.lib import mosaic_gpu_dialect  # noqa: E402
from jax._src.lib.mlir import ir  # noqa: E402
from without_names import write_without_names  # noqa: E402

BYTES = re.compile(r'module = "((?:[^"\\]|\\.)*)"')
ESCAPE = re.compile(r"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


def to_bytes(text: str) -> bytes:
    """Return the bytes of an MLIR string attribute, which writes most of them as two digits."""

    def character(match):
        code = match[1]
        return chr(int(code, 16)) if len(code) == 2 else code

    return ESCAPE.sub(character, text).encode("latin-1")


def module_text(match: re.Match) -> str:
    """Return the module of one kernel as text, without locations and names from Python."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    mosaic_gpu_dialect.register_dialect(context)
    with context:
        module = ir.Module.parse(to_bytes(match[1]))
        text = module.operation.get_asm(enable_debug_info=False)
    text = re.sub(r"@\w+", "@name", text)
    text = re.sub(r'(dump_basename = "[a-z_]+)_\d+"', r'\1"', text)  # a running number
    return f"module = <{text}>"


def main(folder: Path, names: list[str]) -> None:
    """Write a text for each case of sm90a.py, and all digests to digests.txt."""

    def programs():
        for name in names or sm90a.CASES:
            text = sm90a.lowered(**sm90a.CASES[name]).as_text()
            text = re.sub(r'kernel_hash = "(?:[^"\\]|\\.)*"', "", text)
            yield name, BYTES.sub(module_text, text)

    write_without_names(folder, programs())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
