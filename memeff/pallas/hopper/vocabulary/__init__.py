"""Compute the tiles of a vocabulary's logits on Hopper, and what `memeff.vocabulary` needs of them."""
