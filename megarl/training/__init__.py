"""One rank of each model: what it is given to learn from, how it is credited, and its update."""
