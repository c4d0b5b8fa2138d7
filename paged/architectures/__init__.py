"""What config.json says: an architecture as records of its layers, its quantisation and its defaults."""
