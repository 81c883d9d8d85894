"""What layers, stages and steps cost: seconds and bytes, from a profile and a device."""
