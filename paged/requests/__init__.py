"""The state of one request."""
