"""Both runs held against each other: headline, cost, gradients, state."""
