"""Rewards are computed in processes of their own, which end when they take too long or too much."""
