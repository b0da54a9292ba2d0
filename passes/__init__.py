"""The graph passes, one a file; their order is in `zerofx.recipe`."""
