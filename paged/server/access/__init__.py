"""Access: who may use a route, as which tenant, and how much of the server."""
