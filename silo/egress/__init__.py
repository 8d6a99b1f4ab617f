"""The gate: everything that leaves a silo passes here."""
