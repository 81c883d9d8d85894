"""Graph: capture of a module, partition into stages and regions. It knows no process groups and no costs."""
