"""Figures of time and memory, as ratios in one run or medians with spread. Nothing here is a test."""
