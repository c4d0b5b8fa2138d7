"""The modules of a decoder layer, thin over the kernels. Activations are ragged: a row per token."""
