"""The routes of the server: what each URL does."""
