"""Blind exchanges: sums, mixed rows and inner products that the coordinator cannot read."""
