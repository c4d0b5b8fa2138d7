"""Vision towers: what makes embeddings of images."""
