"""Who holds which part of which model, on which slot: layouts and roles; integers, no process."""
