"""The jobs that a silo accepts, by its policy, its budget and its earlier sums."""
