"""Files of a checkpoint: on the hub, in safetensors or GGUF, tensors as stored, and published formats."""
