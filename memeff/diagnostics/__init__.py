"""Tell what a call costs, whether it is right, and what its rows and keys do."""
