"""Describe TPUs that are not here, so that XLA compiles for them: this needs libtpu alone."""

import os

CHIPS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


def set_environment() -> None:
    """Set what libtpu asks the machine for, before JAX starts."""
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "JAX_PLATFORMS": "cpu",
    }


def device_of(chip: str):
    """Return the description of a device."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(CHIPS[chip], platform="tpu").devices[0]


def compiled(function, args, device):
    """Return `function` compiled for a device, from the shapes and dtypes of `args`."""
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(function).trace(*placed).lower(lowering_platforms=("tpu",)).compile()
