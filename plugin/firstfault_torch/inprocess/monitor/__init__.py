"""What watches a rank: a thread in it, a process beside it, and the memory that the two share."""
