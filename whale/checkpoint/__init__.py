"""Checkpoints: the state of a training run in files, from any plan to any plan."""
