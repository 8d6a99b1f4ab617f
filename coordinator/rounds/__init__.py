"""The state machine of rounds, without input or output."""
