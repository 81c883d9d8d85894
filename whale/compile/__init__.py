"""From a captured model and a cluster to the program that each rank runs."""
