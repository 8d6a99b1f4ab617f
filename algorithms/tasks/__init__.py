"""Tasks: what a model learns to say of a record, by which loss, and what evaluation counts."""
