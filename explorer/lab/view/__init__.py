"""Outcomes of lessons as pictures, tables and pages, and the words that lessons use."""
