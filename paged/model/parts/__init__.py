"""Parts of a decoder layer of which there are several kinds, chosen by the ModelConfig."""
