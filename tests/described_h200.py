"""Describe absent H200s, for which JAX's CUDA plugin compiles. This module has no test."""

import os
import pathlib


def set_environment() -> None:
    """Set what JAX reads when it starts."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",  # nothing to tune on
    }


def mesh_of(devices: int, axis: str):
    """Return a mesh of so many absent H200s along one axis."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import AxisType, Mesh

    description = pathlib.Path(__file__).with_name("data") / "h200.txtpb"
    topology = topologies.get_topology_desc(
        "h200", "cuda", target_config=description.read_text(), topology=f"1x1x{devices}"
    )
    described = np.array(topology.devices[:devices])
    return Mesh(described, (axis,), axis_types=(AxisType.Auto,))
