"""Benchmarks that check every result before timing it: see ``flashkda bench --help``."""
