"""Who holds which part of which model, on which slot: layouts and roles; no process and no tensor."""
