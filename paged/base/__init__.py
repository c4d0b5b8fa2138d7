"""What every room stands on: checks of values, kinds of fields, strict JSON, interrupts, and vLLM's names."""
