"""What messages cost on the links of a cluster."""
