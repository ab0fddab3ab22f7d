"""Pipeline runs come in; charts of actions in time, memory by rank and causes of differences go out."""
