import os
os.environ |= {"JAX_PLATFORMS": "cpu","JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1","MOSAIC_GPU_DUMP_PTXAS": "1","XLA_FLAGS": "--xla_gpu_autotune_level=0"}
import pathlib, re, numpy as np, jax
CHIPS = {"sm_80": (8,0,167936,166912,108,2048), "sm_86": (8,6,102400,101376,84,1536), "sm_89": (8,9,102400,101376,128,1536), "sm_90": (9,0,233472,232448,132,2048), "sm_100": (10,0,233472,232448,148,2048), "sm_120": (12,0,102400,101376,170,1536)}
def text(chip):
    major, minor, core, optin, sms, threads = CHIPS[chip]
    t = pathlib.Path("h200.txtpb").read_text()
    t = t.replace("shared_memory_per_core: 233472", f"shared_memory_per_core: {core}").replace("shared_memory_per_block_optin: 232448", f"shared_memory_per_block_optin: {optin}").replace("core_count: 132", f"core_count: {sms}").replace("threads_per_core_limit: 2048", f"threads_per_core_limit: {threads}")
    ext = "    feature_extension: ACCELERATED_FEATURES\n" if major >= 9 else ""
    t = t.replace("    major: 9\n    feature_extension: ACCELERATED_FEATURES\n", f"    major: {major}\n" + (f"    minor: {minor}\n" if minor else "") + ext)
    t = t.replace("Compute Capability 9.0a", f"Compute Capability {major}.{minor}" + ("a" if major>=9 else ""))
    return t
def mesh(chip):
    from jax.experimental import topologies
    from jax.sharding import Mesh, AxisType
    d = topologies.get_topology_desc(chip, "cuda", target_config=text(chip), topology="1x1x1")
    return Mesh(np.array(d.devices[:1]), ("x",), axis_types=(AxisType.Auto,))
def compile(fn, chip, *args):
    from jax.sharding import NamedSharding, PartitionSpec
    m = mesh(chip); s = NamedSharding(m, PartitionSpec())
    with jax.set_mesh(m), jax.default_device(m.devices[0]):
        from jax.experimental.mosaic.gpu import utils
        print('arch', utils._infer_arch())
        return jax.jit(fn, in_shardings=s, out_shardings=s).trace(*args).lower().compile()
