"""Assignment of devices to the stages of a plan, and the mesh of each stage."""
