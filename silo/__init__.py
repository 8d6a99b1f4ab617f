"""The silo agent: trains on its own data, and lets out only what the gate has recorded."""
