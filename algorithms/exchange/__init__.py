"""The four exchanges: what parts a silo shares, how they are combined, and the plain arithmetic."""
