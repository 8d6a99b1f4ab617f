"""The way out: whatever leaves a silo is checked and recorded here."""
