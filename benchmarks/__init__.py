"""One file per question. Each checks its results, then times, prints a table and a last line of JSON."""
