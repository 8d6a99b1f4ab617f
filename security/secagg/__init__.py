"""Secure aggregation: the state machines of silo and coordinator, and their messages."""
