"""OpenAI's Responses: bodies, the conversations that their items are, and the events of answers."""
