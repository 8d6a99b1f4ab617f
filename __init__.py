"""Staddle: cross-silo personalised federated learning with a proof of what left."""
