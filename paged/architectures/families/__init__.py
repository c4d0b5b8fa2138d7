"""The families of models that the decoder computes: what their config.json says, as a ModelConfig."""
