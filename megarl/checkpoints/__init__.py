"""Import and export of Hugging Face checkpoints, and the checkpoints that a run resumes from."""
