"""Advantages, losses, KL estimates, and means with global denominators: pure functions of tensors and numbers."""
