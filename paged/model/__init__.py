"""The decoder, its weights, its batch and its KV cache."""
