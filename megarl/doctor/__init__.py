"""`megarl doctor`: what keeps this machine, or a Ray cluster's nodes, from training, one line each with its mend.

Gathering (`machine`, `packages`, `gpus`, `network`) puts plain values into `facts`; the rules judge them, purely.
"""
