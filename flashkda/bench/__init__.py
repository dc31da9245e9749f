"""Benchmarks. ``python -m flashkda.bench --help`` lists them."""
