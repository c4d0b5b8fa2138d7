"""Anthropic's Messages: bodies, the conversations that their blocks are, and the events of answers."""
