"""Conversations as token buffers that are only appended to, and the tool calls in a model's turns."""
