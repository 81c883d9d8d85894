"""What the command line and plan="auto" share: planning, searching, compiling candidates."""
