"""Benchmarks: one per promise, compared by ratios within one run. Not tests: nothing here asserts a time."""
