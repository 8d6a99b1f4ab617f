"""A silo's agent, and the table of its records."""
