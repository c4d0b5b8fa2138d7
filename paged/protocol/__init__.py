"""Requests and responses as JSON."""
