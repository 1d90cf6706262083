"""Keep keys and values of tokens that were read, and attend to them: caches, pages, allocation."""
