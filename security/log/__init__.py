"""Append-only logs: Merkle trees, signed tree heads, proofs (C2SP, RFC 6962)."""
