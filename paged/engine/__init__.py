"""The loop that steps, and its public faces."""
