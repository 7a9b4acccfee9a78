"""`megarl doctor`: checks this machine, or a Ray cluster's nodes, and prints one line for each problem with its hint.

`machine`, `packages` and `nvidia` gather plain values (`facts`); the rules are pure functions of them.
"""
