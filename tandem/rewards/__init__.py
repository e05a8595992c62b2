"""Rewards: what a response is worth, found by functions that run in worker processes which can be killed."""
