"""Kernels, one file for each family of hardware; each can be deleted without touching another path."""
