"""Access: the keys of tenants, and how much of the server each may use."""
