"""Data sets that Hugging Face's ``datasets`` saved on disk."""
