"""The fields of JSON objects, described once."""
