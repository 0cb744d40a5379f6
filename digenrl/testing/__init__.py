"""Reference implementations and tiny models, for tests, benchmarks and examples."""
