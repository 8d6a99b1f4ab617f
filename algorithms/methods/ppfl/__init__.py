"""PPFL."""
