"""Files at the edges: strict TOML and JSON, canonical JSON, atomic writes, digests that show a
changed disk.
"""
