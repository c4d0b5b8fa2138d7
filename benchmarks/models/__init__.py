"""Families of models compared with a Llama of equal size and with transformers; starts and commands."""
