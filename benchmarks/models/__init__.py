"""Families of models compared with a Llama of equal size, with transformers and with an earlier commit."""
