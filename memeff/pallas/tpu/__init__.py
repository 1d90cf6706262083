"""Run attention in the TPU kernels of JAX's splash attention."""
