"""Compute the tiles of a vocabulary's logits on Hopper, as `memeff.vocabulary` needs them."""
