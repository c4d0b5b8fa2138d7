"""The KV cache: how blocks are laid out, and their tensors."""
