"""Hold kernels for GPUs from Ampere on, which need neither TMA nor wgmma."""
