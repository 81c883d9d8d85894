"""From a module to a graph: capture, partition into stages and regions. It knows no process groups and no costs."""
