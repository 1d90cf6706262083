"""Importing memeff starts no backend and imports no heavy module."""

import os
import subprocess
import sys
import textwrap


def python(code: str, **env) -> subprocess.CompletedProcess:
    """Run a piece of Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_starts_no_backend():
    """The import works on a platform that does not exist, where making an array is an error."""
    imported = python("import memeff", JAX_PLATFORMS="nowhere")
    assert imported.returncode == 0, imported.stderr
    started = python("import memeff, jax.numpy as jnp; jnp.ones(1)", JAX_PLATFORMS="nowhere")
    assert started.returncode != 0
    assert "nowhere" in started.stderr


def test_import_is_light():
    done = python(
        """
        import sys
        import jax, jax.numpy
        before = {*sys.modules}
        import memeff
        new = {name.split(".")[0] for name in {*sys.modules} - before}
        heavy_packages = ("flax", "optax", "jax.experimental.pallas", "memeff.nn")
        heavy = [name for name in sys.modules if name.startswith(heavy_packages)]
        assert not heavy, heavy
        assert all(hasattr(memeff, name) for name in memeff.__all__)
        print(*sorted(new - {*sys.stdlib_module_names}))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["jax", "memeff"], ["memeff"]), done.stdout
