"""HTTP: reading requests, writing responses and streams, within limits."""
