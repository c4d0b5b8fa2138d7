"""Parts of layers that one family has."""
