"""From a failed round to a sealed verdict on one node."""
