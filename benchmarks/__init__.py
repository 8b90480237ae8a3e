"""Benchmarks; each is `python -m benchmarks.<name>`, explains itself with `--help` and ends in one line of JSON."""
