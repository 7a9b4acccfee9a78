"""What a run does when a part of it dies: what is started anew, from what, and how often."""
