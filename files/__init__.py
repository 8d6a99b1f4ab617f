"""Files at the edges: TOML, JSON and tensors, read strictly and written atomically."""
