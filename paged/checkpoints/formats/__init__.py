"""The formats of quantised checkpoints: one module for each reads the tensors of one weight."""
