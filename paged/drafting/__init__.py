"""Guesses of the next tokens, which a step verifies: they change its time, never a token."""
