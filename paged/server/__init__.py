"""The server: OpenAI's API over HTTP, in a process of its own in front of the engine's."""
