"""What is known about the requests of the server: metrics, a log and traces."""
