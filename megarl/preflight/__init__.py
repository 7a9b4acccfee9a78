"""Every check of a recipe before a process starts."""
