"""One rank of each model: the samples that it learns from, the advantages of their tokens, and its update."""
