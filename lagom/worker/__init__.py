"""What runs in a rank, and in the process that holds the ranks of one host."""
