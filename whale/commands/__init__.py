"""Shared by the command line and plan="auto": planning, searching, compiling candidates."""
