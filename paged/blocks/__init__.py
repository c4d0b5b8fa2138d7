"""Which KV blocks belong to which sequence: pure Python, no tensors."""
