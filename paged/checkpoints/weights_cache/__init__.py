"""The cache of packed weights: files that later starts map, in a folder of the user's own."""
