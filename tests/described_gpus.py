"""Describe absent GPUs of several chips, for which JAX's CUDA plugin compiles.

This module has no test. The description of an H200 serves all, with other numbers.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

KIB = 1024


class Chip(NamedTuple):
    """What the compiler and a kernel's launch need to know of a chip."""

    capability: str
    shared_kib: int  # shared memory of a multiprocessor
    multiprocessors: int

    @property
    def largest_block(self) -> int:
        """Return the bytes of shared memory that one thread block may have."""
        return (self.shared_kib - 1) * KIB

    @property
    def description(self) -> str:
        """Return the description that XLA reads."""
        text = (pathlib.Path(__file__).with_name("data") / "h200.txtpb").read_text()
        major, minor = self.capability.split(".")
        has_features = int(major) >= 9  # sm_90a, sm_100a, sm_120a
        changes = {
            "shared_memory_per_core: 233472": f"shared_memory_per_core: {self.shared_kib * KIB}",
            "shared_memory_per_block_optin: 232448": (
                f"shared_memory_per_block_optin: {self.largest_block}"
            ),
            "core_count: 132": f"core_count: {self.multiprocessors}",
            "    major: 9\n": f"    major: {major}\n    minor: {minor}\n",
            "Compute Capability 9.0a": f"Compute Capability {self.capability}",
        }
        if not has_features:
            changes["    feature_extension: ACCELERATED_FEATURES\n"] = ""
        for old, new in changes.items():
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


CHIPS = {
    "sm_80": Chip("8.0", 164, 108),
    "sm_86": Chip("8.6", 100, 84),
    "sm_89": Chip("8.9", 100, 128),
    "sm_90": Chip("9.0", 228, 132),
    "sm_100": Chip("10.0", 228, 148),
    "sm_120": Chip("12.0", 100, 170),
}


@contextlib.contextmanager
def described(name: str) -> Iterator:
    """Compile for a chip inside this context, which has a mesh of one such GPU."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    topology = topologies.get_topology_desc(
        name, "cuda", target_config=CHIPS[name].description, topology="1x1x1"
    )
    devices = np.array(topology.devices[:1])
    mesh = Mesh(devices, ("x",), axis_types=(AxisType.Auto,))
    # Mosaic asks the default device for its compute capability. Without one it takes Hopper's.
    with jax.set_mesh(mesh), jax.default_device(devices[0]):
        yield mesh
