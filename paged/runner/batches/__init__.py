"""The batch of a step: made on the host, or on the device out of what it keeps of each seat."""
