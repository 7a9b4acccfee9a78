"""The endpoint: agents ask the model over HTTP on this machine, with any OpenAI client and a key for each episode."""
