"""What runs inside a training process."""
