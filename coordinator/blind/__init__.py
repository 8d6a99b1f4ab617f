"""The coordinator in blind rounds: secure sums, mixed rows, and what it may open."""
