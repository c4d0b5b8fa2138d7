"""Whose KV lies where: pure Python, no tensors."""
