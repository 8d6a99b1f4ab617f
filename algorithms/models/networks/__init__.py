"""The networks of the table, one family per module."""
