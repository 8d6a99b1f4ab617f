"""The wire: protobuf messages and services, and the one pair of conversions to and from them."""
