"""Both sides on the same devices: the worker, its controller's handle, and the phases that take turns."""
