"""Orders of a pipeline's tasks."""
