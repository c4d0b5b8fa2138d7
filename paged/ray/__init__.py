"""Engines on a Ray cluster (pip install 'paged[ray]'). Nothing else of paged imports ray."""
