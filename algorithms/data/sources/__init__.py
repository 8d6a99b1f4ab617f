"""Readers of records, one file per kind of data source."""
