"""Balancing: shares of rows, heads and layers on mixed devices."""
