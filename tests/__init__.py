"""The tests: a package, so that `tests.models` imports the same way in pytest and in the pool's workers."""
