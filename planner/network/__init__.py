"""Communication costs on the links of a cluster."""
