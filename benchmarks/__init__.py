"""One file per question. Each proves itself right, then times, prints a table and a last line of JSON."""
