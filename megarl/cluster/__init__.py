"""The machines of a run: its Ray session, its worker processes, their network cards, and their cleanup."""
