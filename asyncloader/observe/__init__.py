"""Figures: counters, statistics, the sentence about a run, timelines."""
