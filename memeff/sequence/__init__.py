"""Run attention over a sequence that is sharded over devices."""
