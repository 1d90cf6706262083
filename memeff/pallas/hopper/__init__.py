"""Run attention on Hopper GPUs (H100, H200)."""
