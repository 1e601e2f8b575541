"""What is beside a rank: a thread and a process that watch it, the memory that they share, and the store's host."""
