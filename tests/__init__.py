"""The tests, a package so that `tests.models` and `tests.training` import the same way in pytest and in pool workers."""
