"""Policies that come from outside: files of our own, and settings of training programs."""
