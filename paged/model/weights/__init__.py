"""The weights of a model: the forms that they take in memory, and how they are loaded."""
