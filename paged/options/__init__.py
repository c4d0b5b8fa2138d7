"""What users choose: options of an engine, of speculation and of a request, checked once."""
