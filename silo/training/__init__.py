"""Training of one round in a process of its own."""
