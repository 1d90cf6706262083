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
    code = "import memeff, jax.numpy as jnp; print('imported', flush=True); jnp.ones(1)"
    started = python(code, JAX_PLATFORMS="nowhere")
    assert started.stdout == "imported\n", started.stderr
    assert started.returncode != 0
    assert "nowhere" in started.stderr


def test_import_is_light_and_memeff_nn_says_that_it_needs_flax():
    done = python(
        """
        import sys
        import jax, jax.numpy
        before = {*sys.modules}
        import memeff
        new = {name.split(".")[0] for name in {*sys.modules} - before}
        packages = "flax", "optax", "matplotlib", "tqdm", "jax.experimental.pallas"
        heavy_packages = (*packages, "memeff.nn", "memeff.bench")
        heavy = [name for name in sys.modules if name.startswith(heavy_packages)]
        assert not heavy, heavy
        assert all(hasattr(memeff, name) for name in memeff.__all__)
        print(*sorted(new - {*sys.stdlib_module_names}))
        sys.modules["flax"] = None  # as if it were not installed
        try:
            import memeff.nn
        except ModuleNotFoundError as e:
            assert "pip install 'memeff[flax]'" in str(e), e
        else:
            raise AssertionError("memeff.nn came without flax")
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["jax", "memeff"], ["memeff"]), done.stdout
