"""Read models out of GGUF files: the config, the names of tensors and the tokenizer from their metadata."""
