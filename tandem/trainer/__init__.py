"""The update side: packing, log-probs, mini- and micro-batches, optimizer."""
