"""One model over several processes: who holds what, how ranks start and meet, and what if one ends."""
