"""Split a user's function between XLA and a kernel."""
