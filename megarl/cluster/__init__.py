"""The machines of a run: its Ray session, the processes that it starts there, their cards and their ends."""
