"""Reproducible numbers: seeded random streams, and the devices that compute."""
