"""The compiler: from a model and a cluster to the program of each rank."""
