"""What a chat model writes besides plain text: reasoning and tool calls."""
