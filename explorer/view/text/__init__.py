"""Texts of the pages: a sentence that a student understands for every word that is not everyday English."""
