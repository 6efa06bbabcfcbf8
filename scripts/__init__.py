"""Makes pictures for the docs."""
