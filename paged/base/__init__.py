"""What every room stands on: checks of values, strict JSON, interrupts, and what vLLM calls things."""
