"""What both sides of a worker's connection say to each other."""
