"""The block graph as a drawing."""
