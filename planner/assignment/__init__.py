"""Which devices each stage of a plan runs on, and their mesh."""
