"""Job files and job documents: fields, checks and derived values."""
