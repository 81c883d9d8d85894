"""The simulator of a training step, and views of its timeline."""
