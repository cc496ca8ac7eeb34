"""What is looked at: counters, statistics, the sentence about a run, timelines."""
