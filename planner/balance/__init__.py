"""Shares of rows, heads and layers for unlike devices."""
