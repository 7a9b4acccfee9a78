"""What a run reads: files, prompts and their tokens, streams of prompts."""
