"""Files of a checkpoint: on the hub, in safetensors or GGUF, their tensors as stored, and published formats."""
