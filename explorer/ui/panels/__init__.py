"""The parts of a page: each takes records and draws them, or gives a changed record back."""
