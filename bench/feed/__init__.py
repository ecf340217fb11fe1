"""A feed and a raw ZMQ loop with the same bytes, and ranks that only receive."""
