"""Samples that wait, are counted, summarised or stored: not how they were sampled."""
