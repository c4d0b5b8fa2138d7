"""An OpenAI-compatible server: a front end that speaks HTTP, and processes that run engines."""
