"""What the server costs: its front end alone, with an engine, and beside vLLM's."""
