"""Weights in and out of Hugging Face folders, and what a run goes on from."""
