"""Benchmarks that a user can run: scattered blocks, verified bytes, and a limit measured next to each repetition."""
