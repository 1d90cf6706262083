"""Differentiate functions with hand-written rules, and sums over tiles, in every order."""
