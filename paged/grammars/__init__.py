"""What an output may be: JSON schemas, regular expressions and Lark, as grammars of llguidance."""
