"""Which request computes how many tokens in a step."""
