"""Step time and memory of a compiled step."""
