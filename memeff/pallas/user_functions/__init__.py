"""Split the user's functions between XLA, before a kernel, and the tiles inside it."""
