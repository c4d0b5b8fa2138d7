"""The weights of a model: the files that hold them, and the forms that they take in memory."""
