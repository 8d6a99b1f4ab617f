"""Exact arithmetic: the prime field, fixed point, secret sharing, masks."""
