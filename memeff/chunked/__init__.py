"""Run attention in plain JAX, one tile of logits at a time, on any device."""
