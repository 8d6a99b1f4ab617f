"""Terminal output, units, TOML text and commented example files."""
