"""A language model to start from: `python -m models.train`, `python -m models.generate`, `python -m models.demo`."""
