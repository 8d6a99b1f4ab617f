"""`staddle policy`: draft and explain policies."""
