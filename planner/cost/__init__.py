"""Cost model: seconds and bytes of layers, stages and steps, from a profile and a device."""
