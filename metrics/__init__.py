"""Prometheus metrics of a daemon: what is counted, and the listener that answers."""
