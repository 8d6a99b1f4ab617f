"""What evaluation counts of a model on records, and what such counts say."""
