"""One rank of each model: what it is given to learn from, how it is with_token_advantages, and its update."""
