"""Conversions between protobuf messages and the values that they carry."""
