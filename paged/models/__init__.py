"""Models: one decoder, and what each Hugging Face architecture declares about it."""
