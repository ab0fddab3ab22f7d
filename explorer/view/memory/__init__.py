"""Measurements come in; charts of memory over a step and at its peak go out. Read timeline.py first."""
